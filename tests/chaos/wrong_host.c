// Preloaded into a process, makes its host look wrong: a clock that is off by WRONG_CLOCK_S
// seconds, a disk whose fsync takes WRONG_FSYNC_MS milliseconds.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>

static long NumberOf(const char* name) {
  const char* const value = getenv(name);
  return value == NULL ? 0 : atol(value);
}

int clock_gettime(clockid_t clock, struct timespec* time) {
  static int (*original)(clockid_t, struct timespec*);
  if (original == NULL) *(void**)&original = dlsym(RTLD_NEXT, "clock_gettime");
  const int result = original(clock, time);
  if (clock == CLOCK_REALTIME) time->tv_sec += NumberOf("WRONG_CLOCK_S");
  return result;
}

// Abseil waits until a moment of the system's clock; the kernel does not know of ours.
long syscall(long number, ...) {
  static long (*original)(long, ...);
  if (original == NULL) *(void**)&original = dlsym(RTLD_NEXT, "syscall");
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (int i = 0; i < 6; ++i) arguments[i] = va_arg(list, long);
  va_end(list);
  struct timespec until;
  if (number == SYS_futex && (arguments[1] & FUTEX_CLOCK_REALTIME) != 0 && arguments[3] != 0) {
    until = *(const struct timespec*)arguments[3];
    until.tv_sec -= NumberOf("WRONG_CLOCK_S");
    arguments[3] = (long)&until;
  }
  return original(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                  arguments[5]);
}

int fsync(int fd) {
  static int (*original)(int);
  if (original == NULL) *(void**)&original = dlsym(RTLD_NEXT, "fsync");
  const struct timespec pause = {0, NumberOf("WRONG_FSYNC_MS") * 1000000};
  nanosleep(&pause, NULL);
  return original(fd);
}
