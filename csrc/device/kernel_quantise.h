/* SPDX-License-Identifier: Apache-2.0
 * Pieces as the kernel that quantises walks them.  The tasks of a list of pieces make one
 * table, which is uploaded once; a launch names some of them. */
#ifndef WSYNC_DEVICE_KERNEL_QUANTISE_H
#define WSYNC_DEVICE_KERNEL_QUANTISE_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/status.h"
#include "core/quantise/method.h"
#include "device/quantise_table.h"

/* The part of a table that one launch runs. */
typedef struct wsync_quantise_list {
    uint32_t first; /* tasks */
    uint32_t count;
    uint32_t thread_count;
} wsync_quantise_list_t;

/* By mode of a launch; and the entries of the stream's own table. */
typedef struct wsync_quantise_lists {
    wsync_quantise_list_t of[WSYNC_QUANTISE_MODE_COUNT];
    uint64_t scratch_count;
} wsync_quantise_lists_t;

/* What is uploaded are `count` items and, unless that is 0, count + 1 thread_starts. */
typedef struct wsync_quantise_tasks {
    wsync_quantise_task_t *items;
    uint32_t *thread_starts;
    size_t count;
    wsync_quantise_lists_t lists;
} wsync_quantise_tasks_t;

/* Of pieces as wsync_quantise_check wants them; those without elements become nothing.
 * UNSUPPORTED, which names the tensor: what the kernel does not count so far. */
wsync_status_t wsync_quantise_tasks_init(wsync_quantise_tasks_t *tasks,
                                         const wsync_quantise_piece_t *pieces, size_t count,
                                         wsync_error_t *err);
void wsync_quantise_tasks_fini(wsync_quantise_tasks_t *tasks);

/* Blocks of WSYNC_QUANTISE_BLOCK threads for a launch. */
uint32_t wsync_quantise_grid(const wsync_quantise_list_t *list);

#endif
