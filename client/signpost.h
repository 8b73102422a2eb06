/* Signpost's C ABI (libsignpost.so): what every other language binds to.
 *
 * Conventions, stated once:
 *  - Functions return SIGNPOST_OK (0) or a gRPC status code, and on failure write a message, always
 *    terminated, into `error` (at most `error_size` bytes; `error` may be NULL). Outputs are then
 *    untouched, but for the parameters of a step and the tensors of a reduction: after a failure
 *    other than INVALID_ARGUMENT they may be partly stepped or reduced, and the session, or the
 *    reduction, can only be left.
 *  - Strings are UTF-8 and terminated. Sizes are in elements unless the name says bytes.
 *  - Start options with signpost_options_init, and rates with signpost_rates_init: fields that a
 *    caller does not set keep their defaults.
 *  - SIGNPOST_ABI changes whenever a struct or a function here does; signpost_abi() tells the
 * library's.
 *  - Memory that is passed in stays the caller's. Parameters are borrowed until signpost_close,
 * what is reduced during the call, or as long as a GPU needs it.
 *  - SIGNPOST_TRACE in the environment, a directory, has every process that joins record there what
 * it does when (docs/tracing.md).
 *  - A session or a reduction has one call at a time, different ones may have several. While a call is
 * under way, another thread's call of the same returns SIGNPOST_FAILED_PRECONDITION, which names both,
 * and changes nothing. signpost_steps and signpost_is_synchronised then return what they did before it;
 * signpost_parameters_crc32c, signpost_close and signpost_reduction_close wait. A signpost_state or
 * signpost_config is used by one thread at a time. A signpost_interrupt must not call this library.
 *  - No exception crosses this interface.
 *  - Sessions and reductions belong to the process that has joined. In a fork of it what returns a code returns
 * SIGNPOST_INVALID_ARGUMENT for them, and for joining anything while they are open; closing them
 * frees nothing; and the rest must not be called. Fork before joining, or exec after forking.
 */
#ifndef SIGNPOST_CLIENT_SIGNPOST_H_
#define SIGNPOST_CLIENT_SIGNPOST_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SIGNPOST_API __attribute__((visibility("default")))

/* The codes that are worth telling apart; any other gRPC code may come too. */
enum {
  SIGNPOST_OK = 0,
  SIGNPOST_CANCELLED = 1,
  SIGNPOST_INVALID_ARGUMENT = 3,
  SIGNPOST_DEADLINE_EXCEEDED = 4,
  SIGNPOST_NOT_FOUND = 5,
  SIGNPOST_RESOURCE_EXHAUSTED = 8,
  SIGNPOST_FAILED_PRECONDITION = 9,
  SIGNPOST_UNAVAILABLE = 14,
  SIGNPOST_DATA_LOSS = 15,
};

#define SIGNPOST_ABI 22
#define SIGNPOST_NEVER UINT64_MAX
#define SIGNPOST_AUTO (UINT64_MAX - 1)

/* How numbers travel, both ways. What others than fp32 lose is kept, by workers and aggregators,
 * for the next step or call. int8, int4 and one bit have a scale for each block. */
enum {
  SIGNPOST_CODEC_NONE = 0, /* in reports: nothing was sent, in a local step of 0/1 Adam */
  SIGNPOST_CODEC_FP32 = 1,
  SIGNPOST_CODEC_BF16 = 2,
  SIGNPOST_CODEC_FP16 = 11,
  SIGNPOST_CODEC_INT8 = 12,
  SIGNPOST_CODEC_INT4 = 13,
  SIGNPOST_CODEC_ONE_BIT = 3,
  SIGNPOST_CODEC_CUSTOM = 14, /* codec_library's */
};

typedef struct signpost_session signpost_session;
typedef struct signpost_reduction signpost_reduction;
typedef struct signpost_state signpost_state;
typedef struct signpost_config signpost_config;

/* Adds `count` numbers up, in place, over the processes that train the other shards of the same
 * model. Returns 0, or anything else for a failure, which ends the step with code 10, ABORTED. The
 * thread that is in signpost_join, signpost_step or signpost_begin_step calls it. It must not call
 * this library. */
typedef int (*signpost_sum)(void* context, double* numbers, size_t count);

typedef struct {
  const char* aggregators; /* "host:port,host:port", one for each shard, in shard order */
  /* "unix:path" of this node's worker (`signpost worker`), to which this process attaches: rank and
   * world_size then count processes, as many on each node, node by node; only reductions need
   * aggregators. With a gpu the optimizer runs where the node's worker has it all the same, on its
   * processors or its GPU. NULL: this process is a worker. */
  const char* node;
  /* ca.crt, tls.crt and tls.key, for mTLS with the aggregators. NULL: plain text, which beyond
   * loopback is refused without `insecure`. */
  const char* tls_dir;
  /* With tls_dir: a Kubernetes service account's token, shown with each call, for aggregators that
   * want one; it may be renewed at any time. NULL: none. */
  const char* token_file;
  const char* job;
  uint32_t rank;       /* [0, world_size) */
  uint32_t world_size; /* number of workers, or with a node of processes */
  double join_timeout_s;
  double exchange_timeout_s; /* above 0: of a step without an answer, and for each wait of a
                                checkpoint for other ranks */
  double failure_timeout_s;  /* an aggregator without sign of life is reconnected to; 0.5 or more */
  double round_deadline_s;   /* rounds close without workers that are so late... */
  uint32_t min_workers;      /* ...while so many are not; both 0: they wait for all */
  int32_t gpu; /* that has parameters and gradients, or what is reduced, as CUDA counts; -1: the
                * host has */
  uint32_t block_elements;
  uint32_t chunk_elements; /* that travel in one frame; 0: as suits the model */
  /* That compress and apply, whoever calls included; changes no bit. 0: what SIGNPOST_THREADS says,
   * or SIGNPOST_CONFIG's file, or this process's share of its processors (of LOCAL_WORLD_SIZE), up
   * to 8. */
  uint32_t threads;
  float gamma;
  double variance_floor; /* the least variance at a freeze, as a fraction of its tensor's mean */
  /* With `lamb` alone: a tensor's trust ratio is clipped to [min_coeff, max_coeff]; coeff_beta is
   * of the moving average that is frozen; the factor of one-bit steps is clipped to [factor_min,
   * factor_max], and changes by at most the fraction factor_threshold in a step. */
  double max_coeff;
  double min_coeff;
  double coeff_beta;
  double factor_max;
  double factor_min;
  double factor_threshold;
  /* Steps of dense warm-up; SIGNPOST_NEVER (the default) is plain Adam, or LAMB. SIGNPOST_AUTO: at
   * least 64, and until the variance fits the gradients of the last 32 steps and no learning rate
   * has risen for 1 / (1 - beta1) steps (docs/algorithms.md). With `zero_one` neither: the steps
   * before local ones, of which those that update the variance have variance_codec. */
  uint64_t freeze_step;
  /* Every so many steps after the freeze step gradients travel in variance_codec and refresh the
   * variance; 0: never. SIGNPOST_AUTO: the variance follows the gradients, which needs
   * bias_correction; it is frozen at the first look from freeze_step on at which it fits them. */
  uint64_t variance_refresh_interval;
  /* With `zero_one` alone: before the freeze step the variance is updated in every step for
   * var_update_scaler updates, then in every second for as many, in every fourth, and so on. From
   * it on workers synchronise in every step for local_step_scaler steps (0: as many as
   * freeze_step, or as DeepSpeed one fewer), then in every second for as many, and so on; at
   * least every local_step_clipper-th. */
  uint64_t local_step_scaler;
  uint32_t var_update_scaler;
  uint32_t local_step_clipper;
  uint32_t warm_up_codec; /* how gradients travel before the freeze step; SIGNPOST_CODEC_FP32 */
  /* How the momentum travels from it on, and 0/1 Adam's gradients before it where they update no
   * variance; SIGNPOST_CODEC_ONE_BIT. */
  uint32_t codec;
  /* How gradients travel that refresh the variance, or with `zero_one` update it. In others than
   * SIGNPOST_CODEC_FP32 beta1 must be the same in all groups. */
  uint32_t variance_codec;
  uint8_t bias_correction;
  /* Resume a checkpoint of another number of workers: each takes the mean of their errors. 0: such
   * a checkpoint is refused. */
  uint8_t resume_with_other_world_size;
  /* All ranks begin with rank 0's values, unless they resume. 0: those that begin with others are
   * refused. */
  uint8_t start_from_rank_0;
  uint8_t insecure; /* 1: plain text beyond loopback; both it and tls_dir are refused */
  uint8_t lamb;     /* 1: 1-bit LAMB */
  uint8_t zero_one; /* 1: 0/1 Adam; with neither it is 1-bit Adam, both are refused */
  /* 1: as DeepSpeed has that optimizer, to compare with; docs/algorithms.md says how. Without
   * bias_correction and variance_floor, with a gamma of 1, and with one scale for each tensor, or
   * each 2^24 elements of a larger one, whatever these options and block_elements say. A freeze
   * step is at least 2. Of 0/1 Adam it is DeepSpeed's var_freeze_step + 1. */
  uint8_t as_deepspeed;
  /* What SIGNPOST_CODEC_CUSTOM is: a shared object as signpost_codec.h has it, which the
   * aggregators need too, and options of the codec's own. NULL: none. It runs on the host, with a
   * gpu too. */
  const char* codec_library;
  const char* codec_options;
  const char* resume; /* directory of checkpoints to go on from; NULL: start anew */
  /* Instead of such a directory, what signpost_save_state gave this rank: must stay until
   * signpost_join returns. NULL: start anew. */
  const void* resume_state;
  size_t resume_state_bytes;
  /* The number of shards of each tensor, of which this job trains one (docs/sharding.md). Other
   * jobs train the others; all these jobs have the same tensors, in the same order, with their
   * whole_elements, and take their steps together. What an optimizer decides by a tensor, or by all
   * of them, it decides by the whole ones, for which it needs sum_over_shards. Not with `lamb`,
   * as_deepspeed, node or min_workers. 1: tensors are whole, and sum_over_shards is NULL. */
  uint32_t shards;
  signpost_sum sum_over_shards;
  void* sum_context;
} signpost_options;

/* As training computes gradients. Of a parameter on the host they are fp32. */
enum {
  SIGNPOST_GRADIENT_FP32 = 0,
  SIGNPOST_GRADIENT_BF16 = 1,
  SIGNPOST_GRADIENT_FP16 = 2,
};

typedef struct {
  const char* name;
  const uint64_t* shape; /* `dimensions` sizes */
  size_t dimensions;
  float* values;          /* product of the sizes; see start_from_rank_0 */
  uint32_t group;         /* index into a step's rates */
  uint32_t gradient_type; /* of all its gradients */
  /* With shards > 1: the elements of the tensor of which this is a shard. 0: it is whole. */
  uint64_t whole_elements;
} signpost_parameter;

/* All of them may change from step to step, alike on all ranks. While the variance is frozen a new
 * epsilon waits for the next refresh. */
typedef struct {
  double learning_rate;
  double weight_decay; /* decoupled */
  double beta1;        /* the same in all groups, unless gradients travel in fp32 only: with
                        * warm_up_codec and variance_codec, of 0/1 Adam codec too */
  double beta2;
  double epsilon;
} signpost_rates;

typedef struct {
  uint64_t step;            /* the last one that was taken */
  uint64_t steps_caught_up; /* taken before it in the same call, because the others had gone on */
  uint32_t late_rounds;     /* of single chunks, that closed without this worker's gradient */
  uint32_t codec;           /* in which its numbers travelled: SIGNPOST_CODEC_FP32 and so on */
  uint32_t skipped_rounds;  /* chunks that a non-finite gradient kept out of this step; in 0/1
                             * Adam's intervals blocks too, on this rank alone, on a GPU perhaps of
                             * a step before */
  uint32_t skipped_by_rank; /* of the first one, with skipped_rounds > 0; with nodes the process, of
                             * another node its first one */
  double kernels_s;         /* compressing and applying */
  double wire_s;            /* blocked on transfer and aggregation */
  double wait_s;            /* blocked because another worker was late */
  double sent_bits;         /* of payloads, by parameter and step, on average since joining */
  uint64_t sent_bytes;      /* since joining, as the kernel counted them on this process's sockets to
                             * the aggregators: other sessions' with the same ones are in it */
  uint64_t received_bytes;
} signpost_report;

SIGNPOST_API uint32_t signpost_abi(void);

/* 1 when the library is built with CUDA: otherwise no options may have a gpu. */
SIGNPOST_API int signpost_has_cuda(void);

/* What steps, reductions and checkpoints of this process that wait for others ask from now on,
 * twice a second and on the caller's thread: once it is not 0 the call ends with
 * SIGNPOST_CANCELLED, and a step that does has failed. A checkpoint does not ask while an
 * aggregator does not answer it. A join asks when all ranks are there, before it writes into
 * parameters. With a node all calls ask. NULL: nothing, as at first. */
typedef int (*signpost_interrupt)(void);
SIGNPOST_API void signpost_set_interrupt(signpost_interrupt is_interrupted);

/* What the calling thread's calls ask instead, for as long as it lives. NULL: the same as others',
 * as at first. */
SIGNPOST_API void signpost_set_thread_interrupt(signpost_interrupt is_interrupted);

/* What a program should end with behind a failure with this code, so that launchers and clusters
 * know what to do: 64 wrong configuration, 65 what was saved is damaged, 69 no aggregator, 75 try
 * again, 76 another model, options or version than the others'; 70 a defect. If it is the code of
 * the last failure of a call on this thread, it knows more than the code says: another rank's end
 * passes, another model does not, and both are FAILED_PRECONDITION. */
SIGNPOST_API int signpost_exit_code(int code);

/* Makes exit(status) end this process with `code` instead; other statuses stay. Exit handlers run as
 * ever. For a language whose runtime decides on the status, as Python does: 1 after any exception
 * that nobody has caught. The last call counts. */
SIGNPOST_API void signpost_replace_exit_status(int status, int code);

/* Defaults. */
SIGNPOST_API void signpost_options_init(signpost_options* options);
SIGNPOST_API void signpost_rates_init(signpost_rates* rates);

/* The same, with what the environment says, as `signpost run` sets it, and the configuration file
 * that SIGNPOST_CONFIG names: aggregators, job, rank and world size, and all that
 * docs/configuration.md lists for sessions, if it is there. The strings live as long as the
 * process. */
SIGNPOST_API int signpost_options_from_environment(signpost_options* options, char* error,
                                                   size_t error_size);

/* Reads a configuration file, as docs/configuration.md has it: `path`, or if that is NULL the one
 * that SIGNPOST_CONFIG names, if it does. With `text`, which is then what is in it, `path` is only
 * its name in messages. SIGNPOST_INVALID_ARGUMENT with line and suggestion, but for what is wrong
 * in its section `optimizer`, which the two functions that read it say; SIGNPOST_NOT_FOUND.
 * signpost_config_close frees it. */
SIGNPOST_API int signpost_config_open(const char* path, const char* text, signpost_config** config,
                                      char* error, size_t error_size);
SIGNPOST_API void signpost_config_close(signpost_config* config); /* NULL is allowed */

/* Gives options and rates, which have been started, what its section `optimizer` says, defaults and
 * codec_library included; fields that are not the optimizer's stay. SIGNPOST_INVALID_ARGUMENT if
 * there is none, if it is wrong, with line and suggestion, lacks something, or has a max_grad_norm,
 * which is for Python alone. */
SIGNPOST_API int signpost_config_optimizer(const signpost_config* config, signpost_options* options,
                                           signpost_rates* rates, char* error, size_t error_size);
/* The section as JSON, {"type": "OneBitAdam", "params": {"lr": 0.001}}, checked but for what it
 * lacks, with what was given and counts. NULL: there is none. Lives as long as `config`.
 * SIGNPOST_INVALID_ARGUMENT with line and suggestion. */
SIGNPOST_API int signpost_config_optimizer_json(const signpost_config* config, const char** json,
                                                char* error, size_t error_size);
/* What the environment and the file say of one of a session's keys, such as "job"; NULL: nothing.
 * Lives as long as `config`. */
SIGNPOST_API const char* signpost_config_session(const signpost_config* config, const char* key);

/* Joins the job; blocks until all ranks have. With options->resume the parameters get the values of
 * the newest checkpoint that is whole: SIGNPOST_NOT_FOUND if there is none, SIGNPOST_DATA_LOSS if
 * all are damaged, SIGNPOST_FAILED_PRECONDITION, naming it, for another tensor, option or world
 * size. The same with options->resume_state, which only the rank can use that has saved it. */
SIGNPOST_API int signpost_join(const signpost_options* options,
                               const signpost_parameter* parameters, size_t parameter_count,
                               signpost_session** session, char* error, size_t error_size);

/* With options->gpu: calls put their work on this stream of it (a cudaStream_t) from now on, behind
 * all that is on the one before, which must be there until then. A step has read all gradients when
 * it returns, but for 0/1 Adam's local ones, which read them in the stream's order; parameters are
 * written in that order, perhaps later. The default one, NULL, at first. Whatever makes the
 * parameters must be done before signpost_join. SIGNPOST_INVALID_ARGUMENT, and nothing changes, for
 * a stream of another GPU; of what has failed steps tell. */
SIGNPOST_API int signpost_set_stream(signpost_session* session, void* stream, char* error,
                                     size_t error_size);

/* One optimizer step on the mean of all workers' gradients. gradients[i] belongs to parameter i and
 * has its size and gradient_type; rates[g] applies to the parameters of group g. `report` may be
 * NULL. */
SIGNPOST_API int signpost_step(signpost_session* session, const void* const* gradients,
                               size_t gradient_count, const signpost_rates* rates,
                               size_t rates_count, signpost_report* report, char* error,
                               size_t error_size);

/* The same step in parts, with the same bits, so that the exchange overlaps the computation of
 * gradients: begin, each parameter's gradient in any order, finish. What is complete is compressed
 * and sent at once; parameters change in signpost_finish_step only, until which gradients must stay
 * where and what they are. Other ranks may have another order, or call signpost_step. A step that
 * has begun can only be finished: SIGNPOST_FAILED_PRECONDITION, with nothing changed, for
 * signpost_begin_step, signpost_step and signpost_checkpoint until then, for a gradient that comes
 * twice or before signpost_begin_step, and for signpost_finish_step while one is missing. */
SIGNPOST_API int signpost_begin_step(signpost_session* session, const signpost_rates* rates,
                                     size_t rates_count, char* error, size_t error_size);
SIGNPOST_API int signpost_gradient_ready(signpost_session* session, size_t parameter,
                                         const void* gradient, char* error, size_t error_size);
SIGNPOST_API int signpost_finish_step(signpost_session* session, signpost_report* report,
                                      char* error, size_t error_size);

/* Saves the job as it is after the last step, in a directory that all workers see and that belongs
 * to this job; it is created if need be. Every rank calls it after the same step. Returns once the
 * checkpoint is committed, on every rank; the newest two are kept. After a failure the checkpoints
 * before stay, and training may go on, but after SIGNPOST_DATA_LOSS. */
SIGNPOST_API int signpost_checkpoint(signpost_session* session, const char* directory, char* error,
                                     size_t error_size);

/* The steps that are in the directory's newest committed checkpoint, from which options->resume would
 * go on if it is whole; no session is needed. SIGNPOST_NOT_FOUND: there is none, or no such
 * directory. SIGNPOST_DATA_LOSS: all are damaged. */
SIGNPOST_API int signpost_checkpoint_step(const char* directory, uint64_t* step, char* error,
                                          size_t error_size);

/* Saves this rank's share of such a checkpoint in memory: 16 bytes for each parameter (with 1-bit
 * LAMB 20, with 0/1 Adam between two synchronisations 24), and 4 / n more with n ranks. Once all
 * ranks have saved theirs after the same step, a job goes on from them, each rank with its own, as
 * from a checkpoint; no rank waits for another. After a failure training may go on, but after
 * SIGNPOST_DATA_LOSS. signpost_free_state frees it. */
SIGNPOST_API int signpost_save_state(signpost_session* session, signpost_state** state, char* error,
                                     size_t error_size);
SIGNPOST_API const void* signpost_state_data(const signpost_state* state, size_t* bytes);
SIGNPOST_API void signpost_free_state(signpost_state* state); /* NULL is allowed */

/* What a saved state has of each tensor, in fp32 numbers. */
enum {
  SIGNPOST_FIELD_VALUE = 0,      /* the parameter */
  SIGNPOST_FIELD_EXP_AVG = 1,    /* the momentum */
  SIGNPOST_FIELD_EXP_AVG_SQ = 2, /* the variance */
  SIGNPOST_FIELD_ERROR = 3,      /* this rank's */
  /* The elements of it that this rank saves, perhaps none. signpost_state_make takes all of a
   * tensor's, too, and ignores those that other ranks save. */
  SIGNPOST_FIELD_AGGREGATOR_ERROR = 4,
  SIGNPOST_FIELD_FRESH_EXP_AVG_SQ = 5, /* with `lamb`; zeros before the freeze step */
  SIGNPOST_FIELD_ANCHOR = 6,           /* with `zero_one`: the value at the last synchronisation */
  SIGNPOST_FIELD_LOCAL_SUM = 7, /* with `zero_one`, this rank's; zeros at a synchronisation */
};
#define SIGNPOST_FIELDS 8
/* Only read: this rank's error, plus the number of ranks times those elements of the aggregators'
 * errors that it saves. A job with other tensors goes on from it: its aggregators begin without
 * errors. For that job "scales" and "frozenEpsilons" in the description are rewritten, which have an
 * element for each tensor. */
#define SIGNPOST_FIELD_WHOLE_ERROR 8
/* Only read: SIGNPOST_FIELD_AGGREGATOR_ERROR at its places in the tensor, and zeros elsewhere. */
#define SIGNPOST_FIELD_PLACED_AGGREGATOR_ERROR 9

typedef struct {
  const float* values; /* NULL: zeros; of SIGNPOST_FIELD_ANCHOR the parameter's values */
  size_t elements;
} signpost_numbers;

/* The same state in parts, as PyTorch's optimizers have theirs. The description is a line of JSON, equal
 * on all ranks, with the "step" in it; it lives as long as `state`. SIGNPOST_DATA_LOSS if its bytes
 * are not a saved state. */
SIGNPOST_API int signpost_state_description(signpost_state* state, const char** json, char* error,
                                            size_t error_size);
/* Writes a field of a tensor into `values`, which has room for *elements numbers; or, if that is
 * NULL, its number of elements into *elements. SIGNPOST_INVALID_ARGUMENT: there is no such tensor or
 * field, or too little room. */
SIGNPOST_API int signpost_state_field(signpost_state* state, size_t tensor, uint32_t field,
                                      float* values, size_t* elements, char* error,
                                      size_t error_size);
/* Makes a state out of its parts: numbers[t * SIGNPOST_FIELDS + f] is field f of tensor t. Of
 * `parameters` names and shapes are looked at. Fields that are missing are filled with zeros. The
 * error of a rank is in no other rank's state: without it, what compression has left out on that rank
 * so far is never sent. SIGNPOST_INVALID_ARGUMENT, naming tensor and field, for a wrong number of
 * elements, and for a rank beyond the world; SIGNPOST_FAILED_PRECONDITION for a description of another
 * world size. */
SIGNPOST_API int signpost_state_make(const char* description, uint32_t rank, uint32_t world_size,
                                     const signpost_parameter* parameters, size_t parameter_count,
                                     const signpost_numbers* numbers, signpost_state** state,
                                     char* error, size_t error_size);

/* Steps that were done, those before a resume included: the next one's number. With a round
 * deadline, loops count by it: a late worker takes several steps in one call. */
SIGNPOST_API uint64_t signpost_steps(const signpost_session* session);

/* What newer checkpoints than the one that was resumed were damaged, and how: a line for each, none
 * as a rule. Lives as long as the session. */
SIGNPOST_API const char* signpost_resume_warnings(const signpost_session* session);

/* 1 when this worker came to a job that had gone on without its rank, in the place of a process
 * that is gone: parameters and the optimizer's state are then those of the others, and
 * signpost_steps begins where they are. What the process before had not sent yet is lost;
 * `lost_error_norm`, which may be NULL, gets the most that its Euclidean norm can have been, or NaN
 * if that is not known. 1 too for a process that has attached to its node's worker (options->node)
 * when that had the job already: nothing is lost then. */
SIGNPOST_API int signpost_returned(const signpost_session* session, double* lost_error_norm);

/* 1 when all workers have the same parameters: always, but between 0/1 Adam's synchronisations.
 * Only then they are worth validating, or saving as the model. */
SIGNPOST_API int signpost_is_synchronised(const signpost_session* session);

/* CRC-32C over all parameters: equal on all workers after every step, if
 * signpost_is_synchronised. */
SIGNPOST_API uint32_t signpost_parameters_crc32c(const signpost_session* session);

/* Ends the membership. */
SIGNPOST_API int signpost_leave(signpost_session* session, char* error, size_t error_size);

/* Frees the session, left or not. NULL is allowed. */
SIGNPOST_API void signpost_close(signpost_session* session);

/* Joins a reduction, which turns tensors into their means, or sums with `sum` 1, over all ranks;
 * blocks until all have. It is a job of its own, beside options->job: of the options, those of the
 * optimizer and `resume` are not looked at. `name` tells reductions apart and is the same on all
 * ranks, as are the tensors' names and shapes; the rest of them is not looked at. Tensors are where
 * options->gpu says, and so is what compression loses of them. */
SIGNPOST_API int signpost_reduction_join(const signpost_options* options, const char* name,
                                         uint32_t codec, uint8_t sum,
                                         const signpost_parameter* tensors, size_t tensor_count,
                                         signpost_reduction** reduction, char* error,
                                         size_t error_size);

/* As signpost_set_stream. Tensors are read and written in the stream's order, perhaps written after
 * signpost_reduce has returned. */
SIGNPOST_API int signpost_reduction_set_stream(signpost_reduction* reduction, void* stream,
                                               char* error, size_t error_size);

/* In place: values[i] belongs to tensor i, has its size, and gets the mean or sum, the same bytes
 * on all ranks. All ranks call it equally often. `report` may be NULL; with skipped_rounds > 0
 * chunks of the result are NaN on all ranks, because some rank's values there were not finite, or
 * too large to be packed: above 1e18, in int8 1e17, in int4 7e15, in one bit 1e15 (kernels/block.h).
 * What the others had put in is kept for the next call, or with fp32 dropped.
 * Code 11, OUT_OF_RANGE, if all of them can be packed and their sum is too large: the reduction can
 * only be left then. */
SIGNPOST_API int signpost_reduce(signpost_reduction* reduction, float* const* values,
                                 size_t value_count, signpost_report* report, char* error,
                                 size_t error_size);

/* Ends the membership. */
SIGNPOST_API int signpost_reduction_leave(signpost_reduction* reduction, char* error,
                                          size_t error_size);

/* Frees the reduction, left or not. NULL is allowed. */
SIGNPOST_API void signpost_reduction_close(signpost_reduction* reduction);

#ifdef __cplusplus
}
#endif

#endif /* SIGNPOST_CLIENT_SIGNPOST_H_ */
