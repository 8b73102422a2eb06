// Codecs that do not keep what signpost_codec.h asks for; the option says how.

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "proto/signpost_codec.h"

static atomic_int opened, closed;

/* The last one that had been opened when the codecs with the fault "ends" ended. */
static atomic_int ended;

/* What throws, as only C++ can. */
static void (*thrower)(void);

int faulty_opened(void) { return opened; }
int faulty_closed(void) { return closed; }
void faulty_end(void) { ended = opened; }
void faulty_set_thrower(void (*throws)(void)) { thrower = throws; }

typedef struct {
  const char* fault;
  int number; /* of those that have been opened, from 1 */
} faulty;

static int is(const void* state, const char* fault) {
  return strcmp(((const faulty*)state)->fault, fault) == 0;
}

static int has_ended(const void* state) {
  return is(state, "ends") && ((const faulty*)state)->number <= ended;
}

static void throw_if(const void* state, const char* fault) {
  if (is(state, fault) && thrower != NULL) thrower();
}

static void* open_faulty(const char* options, char* error, size_t error_size) {
  static const char* const faults[] = {"",
                                       "cannot unpack",
                                       "cannot unpack halves",
                                       "chance",
                                       "ends",
                                       "large",
                                       "leaves bytes",
                                       "needs alignment",
                                       "no bytes for one",
                                       "not finite",
                                       "one scratch for all",
                                       "overshoots",
                                       "sends nothing",
                                       "sends nothing of few",
                                       "shrinks",
                                       "throws block_bytes",
                                       "throws compress",
                                       "throws decompress",
                                       "throws open",
                                       "unpacks behind",
                                       "writes behind"};
  for (size_t i = 0; i < sizeof faults / sizeof faults[0]; ++i) {
    if (strcmp(options, faults[i]) != 0) continue;
    if (strcmp(options, "throws open") == 0 && thrower != NULL) thrower();
    faulty* const state = malloc(sizeof *state);
    state->fault = faults[i];
    state->number = ++opened;
    return state;
  }
  strncpy(error, strcmp(options, "refuses silently") == 0 ? "" : "not today", error_size);
  return NULL;
}

static void close_faulty(void* state) {
  ++closed;
  free(state);
}

static size_t block_bytes(const void* state, uint32_t elements) {
  if (is(state, "large")) return (size_t)1 << 40;
  if (has_ended(state) || (is(state, "no bytes for one") && elements == 1)) return 0;
  throw_if(state, "throws block_bytes");
  if (is(state, "shrinks")) return 70000 - elements;
  return sizeof(float) * (size_t)elements;
}

/* Atomic, so that it is wrong and no more than that. */
static void compress_by_scratch(const float* values, size_t bytes, uint8_t* block) {
  static _Atomic uint8_t scratch[65536 * sizeof(float)];
  const uint8_t* const from = (const uint8_t*)values;
  for (size_t i = 0; i < bytes; ++i) {
    atomic_store_explicit(&scratch[i], from[i], memory_order_relaxed);
  }
  sched_yield();
  for (size_t i = 0; i < bytes; ++i) {
    block[i] = atomic_load_explicit(&scratch[i], memory_order_relaxed);
  }
}

static void compress(const void* state, const float* values, uint32_t elements, uint8_t* block) {
  static uint8_t chance;
  const size_t bytes = sizeof(float) * elements;
  if (has_ended(state)) return;
  throw_if(state, "throws compress");
  if (is(state, "leaves bytes") && elements > 1) return;
  if (is(state, "one scratch for all")) return compress_by_scratch(values, bytes, block);
  memcpy(block, values, bytes);
  if (is(state, "writes behind")) block[bytes] = 0;
  if (is(state, "chance")) block[0] = ++chance;
  if (is(state, "sends nothing") || (is(state, "sends nothing of few") && elements <= 10)) {
    memset(block, 0, bytes);
  }
}

static int decompress(const void* state, const uint8_t* block, uint32_t elements, float* values) {
  if (is(state, "cannot unpack") || has_ended(state)) return 1;
  throw_if(state, "throws decompress");
  /* Where a vector's instructions write to, or end the process. */
  if (is(state, "needs alignment")) values = (float*)((uintptr_t)values & ~(uintptr_t)15);
  memcpy(values, block, sizeof(float) * elements);
  if (is(state, "unpacks behind")) values[elements] = 0;
  if (is(state, "cannot unpack halves") && values[0] == 0.5f) return 1;
  if (is(state, "overshoots")) values[0] *= 2;
  if (is(state, "not finite")) values[0] = NAN;
  return 0;
}

const signpost_codec_v2* signpost_codec(void) {
  static const signpost_codec_v2 codec = {
      SIGNPOST_CODEC_ABI, "faulty",    "1",      open_faulty,
      close_faulty,       block_bytes, compress, decompress,
  };
  return &codec;
}
