/* The smallest whole training job on the C ABI: two tensors drawn to the mean of what the workers
 * want.
 *
 *   ./signpost run -n 3 -- bazel-bin/client/examples/two_tensors
 *
 * Worker r pulls every value towards r, so that with n workers all of them must arrive at (n - 1)
 * / 2. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/signpost.h"

enum { WEIGHTS = 24 * 10, BIASES = 10, STEPS = 400 };

static float weights[WEIGHTS], biases[BIASES];
static float weight_gradient[WEIGHTS], bias_gradient[BIASES];

static void pull(const float* values, float* gradient, int count, float towards) {
  for (int i = 0; i < count; ++i) gradient[i] = values[i] - towards;
}

static float largest_distance(const float* values, int count, float from) {
  float largest = 0;
  for (int i = 0; i < count; ++i) largest = fmaxf(largest, fabsf(values[i] - from));
  return largest;
}

// The exit code, which says whether to start it again.
static int fail(const char* what, int code, const char* error) {
  fprintf(stderr, "%s: %s\n", what, error);
  return signpost_exit_code(code);
}

int main(void) {
  if (signpost_abi() != SIGNPOST_ABI) {
    return fail("libsignpost.so", SIGNPOST_FAILED_PRECONDITION, "another ABI than signpost.h's");
  }
  char error[512];
  signpost_options options;
  int code = signpost_options_from_environment(&options, error, sizeof error);
  if (code) return fail("options", code, error);
  options.freeze_step = 80;

  const uint64_t weights_shape[] = {24, 10}, biases_shape[] = {10};
  const signpost_parameter parameters[] = {
      {.name = "weights", .shape = weights_shape, .dimensions = 2, .values = weights},
      {.name = "biases", .shape = biases_shape, .dimensions = 1, .values = biases, .group = 1},
  };
  signpost_session* session;
  code = signpost_join(&options, parameters, 2, &session, error, sizeof error);
  if (code) return fail("join", code, error);

  const void* gradients[] = {weight_gradient, bias_gradient};
  signpost_report report;
  signpost_rates rates[2];  // by group
  for (int group = 0; group < 2; ++group) {
    signpost_rates_init(&rates[group]);
    rates[group].beta2 = 0.99;
  }
  for (int step = 0; step < STEPS; ++step) {
    pull(weights, weight_gradient, WEIGHTS, (float)options.rank);
    pull(biases, bias_gradient, BIASES, (float)options.rank);
    const double learning_rate = 0.05 * (1 - (double)step / STEPS);
    rates[0].learning_rate = learning_rate;
    rates[1].learning_rate = 0.5 * learning_rate;
    code = signpost_step(session, gradients, 2, rates, 2, &report, error, sizeof error);
    if (code) return fail("step", code, error);
  }

  const float mean = (options.world_size - 1) / 2.0f;
  const float distance =
      fmaxf(largest_distance(weights, WEIGHTS, mean), largest_distance(biases, BIASES, mean));
  printf("done: parameters %08x, at most %.4f from %.2f, sent %llu bytes, received %llu bytes\n",
         signpost_parameters_crc32c(session), distance, mean, (unsigned long long)report.sent_bytes,
         (unsigned long long)report.received_bytes);
  code = signpost_leave(session, error, sizeof error);
  signpost_close(session);
  if (code) return fail("leave", code, error);
  if (distance < 0.05f) return EXIT_SUCCESS;
  fprintf(stderr, "result: too far from the workers' mean\n");
  return EXIT_FAILURE;
}
