// Codecs that do not keep what signpost_codec.h asks for; the option says how.

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "proto/signpost_codec.h"

static atomic_int opened, closed;

int faulty_opened(void) { return opened; }
int faulty_closed(void) { return closed; }

static void* open_faulty(const char* options, char* error, size_t error_size) {
  static char faults[][24] = {"",
                              "cannot unpack",
                              "cannot unpack halves",
                              "chance",
                              "large",
                              "leaves bytes",
                              "not finite",
                              "one scratch for all",
                              "overshoots",
                              "sends nothing",
                              "shrinks",
                              "unpacks behind",
                              "writes behind"};
  for (size_t i = 0; i < sizeof faults / sizeof faults[0]; ++i) {
    if (strcmp(options, faults[i]) != 0) continue;
    ++opened;
    return faults[i];
  }
  strncpy(error, "not today", error_size);
  return NULL;
}

static void close_faulty(void* state) { ++closed; }

static int is(const void* state, const char* fault) { return strcmp(state, fault) == 0; }

static size_t block_bytes(const void* state, uint32_t elements) {
  if (is(state, "large")) return (size_t)1 << 40;
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
  if (is(state, "leaves bytes") && elements > 1) return;
  if (is(state, "one scratch for all")) return compress_by_scratch(values, bytes, block);
  memcpy(block, values, bytes);
  if (is(state, "writes behind")) block[bytes] = 0;
  if (is(state, "chance")) block[0] = ++chance;
  if (is(state, "sends nothing")) memset(block, 0, bytes);
}

static int decompress(const void* state, const uint8_t* block, uint32_t elements, float* values) {
  if (is(state, "cannot unpack")) return 1;
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
