/* A codec that is a Python class, for experiments: a process of the interpreter for each that is
 * open, which compresses and decompresses one block at a time (signpost/_codec_host.py). */

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/signpost_codec.h"

extern char** environ;

#define MOST_ELEMENTS 65536

/* A host that takes longer to answer is given up. */
#define MOST_SECONDS 60

#define REMEDY "SIGNPOST_PYTHON names the interpreter here, which must have NumPy and Signpost"

typedef struct {
  pthread_mutex_t mutex;
  pid_t pid;     /* the interpreter */
  int socket;    /* to it */
  int has_ended; /* it has, or its answers are not what was asked for: it has no more of them */
  size_t block_bytes[MOST_ELEMENTS + 1]; /* 0: not asked for yet */
} host;

static int write_all(int socket, const void* bytes, size_t size) {
  const char* from = bytes;
  while (size > 0) {
    const ssize_t sent = send(socket, from, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return 0;
    from += sent;
    size -= (size_t)sent;
  }
  return 1;
}

static int read_all(int socket, void* bytes, size_t size) {
  char* to = bytes;
  while (size > 0) {
    const ssize_t received = read(socket, to, size);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) return 0;
    to += received;
    size -= (size_t)received;
  }
  return 1;
}

static const char* interpreter(void) {
  const char* named = getenv("SIGNPOST_PYTHON");
  return named == NULL ? "python3" : named;
}

/* Runs the interpreter with one end of the socket as its standard input. Signals that ask a group
 * of processes to stop are not for it: this process may need it to stop in order, and it ends when
 * the socket is closed. They are blocked until it has handlers. */
static int start(const char* options, int theirs, pid_t* pid) {
  const char* python = interpreter();
  char* const arguments[] = {(char*)python, "-m", "signpost._codec_host", (char*)options, NULL};
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  static const int stops[] = {SIGHUP, SIGINT, SIGTERM};
  sigset_t blocked; /* whatever this thread has blocked */
  sigemptyset(&blocked);
  for (size_t i = 0; i < sizeof stops / sizeof stops[0]; ++i) sigaddset(&blocked, stops[i]);
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, theirs, STDIN_FILENO);
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setsigmask(&attributes, &blocked);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  errno = posix_spawnp(pid, python, &actions, &attributes, arguments, environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  return errno == 0;
}

/* Whatever it is doing: a module that is imported may take for ever. Not when the program has asked
 * how it ended already, as its number may be another's then. */
static void end(pid_t pid) {
  siginfo_t ended;
  if (waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT) != 0) return;
  kill(pid, SIGKILL);
  while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) continue;
}

/* The host's first word: nothing, or what is wrong. */
static int is_ready(int socket, char* error, size_t error_size) {
  uint32_t size = 0;
  if (!read_all(socket, &size, sizeof size)) {
    snprintf(error, error_size,
             "its Python process, of '%s', has ended, or not begun to answer in %d s; see "
             "above. " REMEDY,
             interpreter(), MOST_SECONDS);
    return 0;
  }
  if (size == 0) return 1;
  if (size >= error_size) size = (uint32_t)error_size - 1;
  if (!read_all(socket, error, size)) size = 0;
  error[size] = '\0';
  return 0;
}

static void* open_host(const char* options, char* error, size_t error_size) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    snprintf(error, error_size, "no socket: %s", strerror(errno));
    return NULL;
  }
  const struct timeval most = {.tv_sec = MOST_SECONDS};
  setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
  setsockopt(ends[0], SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
  pid_t pid = 0;
  const int started = start(options, ends[1], &pid);
  close(ends[1]);
  host* opened = started ? calloc(1, sizeof *opened) : NULL;
  if (!started) {
    snprintf(error, error_size, "its Python process, of '%s', could not be started: %s. " REMEDY,
             interpreter(), strerror(errno));
  } else if (opened == NULL) {
    snprintf(error, error_size, "out of memory");
  } else if (is_ready(ends[0], error, error_size)) {
    opened->pid = pid;
    opened->socket = ends[0];
    pthread_mutex_init(&opened->mutex, NULL);
    return opened;
  }
  close(ends[0]);
  if (started) end(pid);
  free(opened);
  return NULL;
}

/* Asks with a block of `sent` bytes, and gets an answer of `wanted` bytes. Returns 0 if Python does
 * not know one. */
static int ask(host* asked, char what, uint32_t elements, const void* bytes, size_t sent,
               void* answer, size_t wanted) {
  const uint64_t question[] = {(uint64_t)what, elements, sent};
  uint64_t got = 0;
  pthread_mutex_lock(&asked->mutex);
  const int is_there = !asked->has_ended && write_all(asked->socket, question, sizeof question) &&
                       write_all(asked->socket, bytes, sent) &&
                       read_all(asked->socket, &got, sizeof got) &&
                       (got == 0 || (got == wanted && read_all(asked->socket, answer, wanted)));
  /* Without a block there is nothing that could be sent, from now on either. */
  const int ends = !is_there || (got == 0 && what != 'd');
  if (ends && !asked->has_ended) {
    __atomic_store_n(&asked->has_ended, 1, __ATOMIC_RELEASE);
    shutdown(asked->socket, SHUT_RDWR);
    end(asked->pid);
    fprintf(stderr, "signpost: a codec's Python process has no answer, and is given up\n");
  }
  pthread_mutex_unlock(&asked->mutex);
  return is_there && got == wanted;
}

/* Also when nobody has asked it anything since. */
static int is_gone(const host* asked) {
  char next;
  if (__atomic_load_n(&asked->has_ended, __ATOMIC_ACQUIRE)) return 1;
  const ssize_t received = recv(asked->socket, &next, 1, MSG_PEEK | MSG_DONTWAIT);
  return received == 0 || (received < 0 && errno != EAGAIN && errno != EINTR);
}

static size_t block_bytes(const void* state, uint32_t elements) {
  host* asked = (host*)state;
  if (elements > MOST_ELEMENTS || is_gone(asked)) return 0;
  size_t* known = &asked->block_bytes[elements];
  uint64_t answer = 0;
  size_t bytes = __atomic_load_n(known, __ATOMIC_RELAXED);
  if (bytes == 0 && ask(asked, 'b', elements, NULL, 0, &answer, sizeof answer)) {
    bytes = answer;
    __atomic_store_n(known, bytes, __ATOMIC_RELAXED);
  }
  return bytes;
}

static void compress(const void* state, const float* values, uint32_t elements, uint8_t* block) {
  const size_t bytes = block_bytes(state, elements);
  ask((host*)state, 'c', elements, values, sizeof(float) * elements, block, bytes);
}

static int decompress(const void* state, const uint8_t* block, uint32_t elements, float* values) {
  const size_t bytes = block_bytes(state, elements);
  return !ask((host*)state, 'd', elements, block, bytes, values, sizeof(float) * elements);
}

static void close_host(void* state) {
  host* closed = state;
  if (!closed->has_ended) end(closed->pid);
  close(closed->socket);
  pthread_mutex_destroy(&closed->mutex);
  free(closed);
}

const signpost_codec_v2* signpost_codec(void) {
  static const signpost_codec_v2 codec = {
      SIGNPOST_CODEC_ABI, "python", "1", open_host, close_host, block_bytes, compress, decompress,
  };
  return &codec;
}
