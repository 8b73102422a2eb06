/* A codec from outside: of each block, the numbers of the largest magnitude, as they are, and zeros
 * for all others, which wait in the error (Stich et al., "Sparsified SGD with memory",
 * arXiv:1809.07599).
 *
 *     cc -shared -fPIC -O2 -I INCLUDE topk.c -o libtopk.so -lm
 *     signpost codec check ./libtopk.so --options ratio=0.05
 *
 * with signpost_codec.h in INCLUDE/proto: INCLUDE is the source tree, or Python's signpost.INCLUDE.
 * Its option: ratio=R, the share that is sent, in (0, 1]; 0.01 by default. A block of n numbers is
 * k = ceil(R n) indices of 2 bytes, ascending, and then their k numbers in fp32, both
 * little-endian. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/signpost_codec.h"

typedef struct {
  double ratio;
} topk;

typedef struct {
  float value;
  uint16_t index;
} entry;

static void* open_topk(const char* options, char* error, size_t error_size) {
  double ratio = 0.01;
  char behind;
  if (*options != '\0' && sscanf(options, "ratio=%lf%c", &ratio, &behind) != 1) {
    snprintf(error, error_size, "wanted ratio=R");
    return NULL;
  }
  if (!(ratio > 0 && ratio <= 1)) {
    snprintf(error, error_size, "ratio is %g, wanted a number in (0, 1]", ratio);
    return NULL;
  }
  topk* state = malloc(sizeof *state);
  if (state == NULL) {
    snprintf(error, error_size, "out of memory");
    return NULL;
  }
  state->ratio = ratio;
  return state;
}

static uint32_t count_of(const void* state, uint32_t elements) {
  const uint32_t count = (uint32_t)ceil(((const topk*)state)->ratio * elements);
  return count < elements ? count : elements;
}

static size_t block_bytes(const void* state, uint32_t elements) {
  return (sizeof(uint16_t) + sizeof(float)) * (size_t)count_of(state, elements);
}

/* The larger magnitude first; of equal ones, the lower index, so that there is one order only. */
static int by_magnitude(const void* left, const void* right) {
  const entry *a = left, *b = right;
  const float difference = fabsf(b->value) - fabsf(a->value);
  if (difference != 0) return difference > 0 ? 1 : -1;
  return (int)a->index - (int)b->index;
}

static int by_index(const void* left, const void* right) {
  return (int)((const entry*)left)->index - (int)((const entry*)right)->index;
}

static void compress(const void* state, const float* values, uint32_t elements, uint8_t* block) {
  static _Thread_local entry entries[65536];
  const uint32_t count = count_of(state, elements);
  for (uint32_t i = 0; i < elements; ++i) {
    entries[i].value = values[i];
    entries[i].index = (uint16_t)i;
  }
  qsort(entries, elements, sizeof(entry), by_magnitude);
  qsort(entries, count, sizeof(entry), by_index);
  uint8_t* numbers = block + sizeof(uint16_t) * count;
  for (uint32_t i = 0; i < count; ++i) {
    memcpy(block + sizeof(uint16_t) * i, &entries[i].index, sizeof(uint16_t));
    memcpy(numbers + sizeof(float) * i, &entries[i].value, sizeof(float));
  }
}

static int decompress(const void* state, const uint8_t* block, uint32_t elements, float* values) {
  const uint32_t count = count_of(state, elements);
  const uint8_t* numbers = block + sizeof(uint16_t) * count;
  memset(values, 0, sizeof(float) * elements);
  uint32_t least = 0; /* that the next index can be */
  for (uint32_t i = 0; i < count; ++i) {
    uint16_t index;
    memcpy(&index, block + sizeof(uint16_t) * i, sizeof index);
    if (index < least || index >= elements) return 1;
    memcpy(&values[index], numbers + sizeof(float) * i, sizeof(float));
    least = index + 1u;
  }
  return 0;
}

const signpost_codec_v2* signpost_codec(void) {
  static const signpost_codec_v2 codec = {
      SIGNPOST_CODEC_ABI, "topk", "1", open_topk, free, block_bytes, compress, decompress,
  };
  return &codec;
}
