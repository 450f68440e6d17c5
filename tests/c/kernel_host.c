/* SPDX-License-Identifier: Apache-2.0
 * What kernels.cu needs of a device, in C11.  Its threads do not talk to each other but
 * by atomic operations, so they run one after another, in another order at every launch. */
#include "kernel_host.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500 };

typedef struct host_index {
    unsigned x;
} host_index_t;

/* The built-in variables: of every thread that launches its own. */
static _Thread_local host_index_t gridDim;
static _Thread_local host_index_t blockDim;
static _Thread_local host_index_t blockIdx;
static _Thread_local host_index_t threadIdx;

#define DEVICE static inline
#define KERNEL static void
#define ALIGNED(nbytes) __attribute__((aligned(nbytes)))
#define MAY_ALIAS __attribute__((may_alias))
#define UNROLL
#define NO_UNROLL
#define GLOBAL(address) ((void *)(uintptr_t)(address))
#define TABLE(field) (field)

#include "device/kernels.cu"

static unsigned long long greatest_divisor(unsigned long long a, unsigned long long b)
{
    while (b != 0) {
        const unsigned long long rest = a % b;

        a = b;
        b = rest;
    }
    return a;
}

/* A step of a launch's own from thread to thread that comes to all of them: prime to their
 * number. */
static unsigned long long draw_step(unsigned long long threads)
{
    static atomic_uint launches;
    unsigned long long step = 1 + atomic_fetch_add(&launches, 1) * 2654435761ULL % threads;

    while (greatest_divisor(step, threads) != 1) {
        step++;
    }
    return step;
}

int wsync_host_kernel_launch(const char *name, unsigned grid, unsigned block, void **params)
{
    const int copies = strcmp(name, WSYNC_KERNEL_NAME) == 0;
    const unsigned long long threads = (unsigned long long)grid * block;
    unsigned long long step;
    unsigned long long thread = 0;

    if (!copies && strcmp(name, WSYNC_QUANTISE_KERNEL_NAME) != 0) {
        return NOT_FOUND;
    }
    if (grid == 0 || block == 0 || block % WSYNC_KERNEL_WARP != 0 ||
        block > (copies ? WSYNC_KERNEL_BLOCK : WSYNC_QUANTISE_BLOCK)) {
        return INVALID_VALUE;
    }
    gridDim.x = grid;
    blockDim.x = block;
    step = draw_step(threads);
    for (unsigned long long i = 0; i < threads; i++, thread = (thread + step) % threads) {
        blockIdx.x = (unsigned)(thread / block);
        threadIdx.x = (unsigned)(thread % block);
        if (copies) {
            wsync_copy(*(const wsync_kernel_args_t *)params[0]);
        } else {
            wsync_quantise(*(const wsync_quantise_args_t *)params[0]);
        }
    }
    return SUCCESS;
}
