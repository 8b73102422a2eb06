/* A codec from outside: how numbers travel, both ways, in jobs that ask for it by its name.
 *
 * A shared object exports signpost_codec(). It is loaded by every worker and every aggregator of a
 * job that uses it (`signpost aggregator --codec-library`, SessionOptions::codec_library, Python's
 * signpost.Codec), which refuse each other when names, versions or options differ, or what they
 * make of some fixed numbers. Signpost does the rest: errors on both sides, sums over ranks,
 * replay, checkpoints. What a block stands for is subtracted from what was packed, so a codec may
 * lose as much as it likes, but what it keeps must bring the error down in the long run.
 *
 *  - A block is at most 65536 numbers of one tensor (4096 by default; its last one may be short),
 *    and is packed by itself.
 *  - Functions are called from several threads at a time, with the same state.
 *  - The same numbers must give the same bytes, and the same bytes the same numbers, on every
 *    machine of a job: neither time nor chance may show, unless it is chance with a seed from the
 *    numbers.
 *  - No function may fail but where it says so, or throw.
 *  - `values` are aligned as a float is, to 4 bytes and no more; blocks to nothing.
 *  - `signpost codec check` holds a codec to all of this that can be tried. */

#ifndef SIGNPOST_PROTO_SIGNPOST_CODEC_H_
#define SIGNPOST_PROTO_SIGNPOST_CODEC_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SIGNPOST_CODEC_ABI 2

typedef struct {
  uint32_t abi; /* SIGNPOST_CODEC_ABI */
  /* By which jobs ask for it, and what its payloads mean: change the version when that changes.
   * A checkpoint, too, has these, the options and what the codec makes of some fixed numbers, and
   * is resumed with the same alone. */
  const char* name;
  const char* version;

  /* A codec with these options, which are the job's and the same everywhere: a text of the codec's
   * own, "" by default. NULL, and why, if they are wrong: up to `error_size` bytes with a 0. */
  void* (*open)(const char* options, char* error, size_t error_size);

  /* What `open` returned is not used any more: the last job that had it is over. Soon done. NULL if
   * there is nothing to do. */
  void (*close)(void* state);

  /* Bytes that a block of so many numbers takes, of 1 to 65536 numbers; at least 1 and at most 16
   * for each and 4096, and never more for fewer. 0 from then on if the codec has ended, as when a
   * process behind it is gone: jobs that have it fail with INTERNAL, and the next one opens it
   * anew. */
  size_t (*block_bytes)(const void* state, uint32_t elements);

  /* Packs finite numbers, of at most 2^60 in magnitude. Writes all of the block's bytes. */
  void (*compress)(const void* state, const float* values, uint32_t elements, uint8_t* block);

  /* values[i] = what the block stands for. Returns 0; or anything else when no call of compress can
   * have made it: it may come from anybody, and have any bytes. */
  int (*decompress)(const void* state, const uint8_t* block, uint32_t elements, float* values);
} signpost_codec_v2;

/* What a shared object exports. What it points to stays for ever. */
__attribute__((visibility("default"))) const signpost_codec_v2* signpost_codec(void);

#ifdef __cplusplus
}
#endif

#endif /* SIGNPOST_PROTO_SIGNPOST_CODEC_H_ */
