/* SPDX-License-Identifier: Apache-2.0
 * A batch of pieces, given to a stream of the driver. */
#ifndef WSYNC_DEVICE_CUDA_QUANTISE_H
#define WSYNC_DEVICE_CUDA_QUANTISE_H

#include "device/cuda_runner.h"

/* Enqueues a batch that has passed wsync_quantise_check, as wsync_cuda_runner_run does.
 * *begun: part of it is enqueued; after an error the stream must then be abandoned. */
wsync_status_t wsync_cuda_quantise(wsync_cuda_runner_t *runner,
                                   const wsync_quantise_batch_t *batch, bool *begun,
                                   wsync_error_t *err);

#endif
