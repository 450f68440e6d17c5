/* SPDX-License-Identifier: Apache-2.0
 * Allocations that fail on demand.  Programs named oom_<name>.c are linked with --wrap, so
 * that every allocation of wsync's own code comes through here. */
#ifndef WSYNC_TESTS_OOM_H
#define WSYNC_TESTS_OOM_H

#include <stdatomic.h>

#include "harness.h"

void *__real_malloc(size_t nbytes);
void *__real_calloc(size_t count, size_t nbytes);
void *__real_realloc(void *memory, size_t nbytes);
void __real_free(void *memory);
void *__wrap_malloc(size_t nbytes);
void *__wrap_calloc(size_t count, size_t nbytes);
void *__wrap_realloc(void *memory, size_t nbytes);
void __wrap_free(void *memory);

static atomic_long oom_left = -1;  /* allocations until one fails; negative: none fails */
static atomic_long oom_live;       /* blocks that are allocated */
static atomic_long oom_made;       /* allocations, also of blocks that grow */
static _Thread_local long oom_own; /* the same by this thread */

static bool oom_strikes(void)
{
    atomic_fetch_add(&oom_made, 1);
    oom_own++;
    return atomic_load(&oom_left) >= 0 && atomic_fetch_sub(&oom_left, 1) == 0;
}

static void *oom_count(void *memory)
{
    if (memory != NULL) {
        atomic_fetch_add(&oom_live, 1);
    }
    return memory;
}

void *__wrap_malloc(size_t nbytes)
{
    return oom_strikes() ? NULL : oom_count(__real_malloc(nbytes));
}

void *__wrap_calloc(size_t count, size_t nbytes)
{
    return oom_strikes() ? NULL : oom_count(__real_calloc(count, nbytes));
}

void *__wrap_realloc(void *memory, size_t nbytes)
{
    if (oom_strikes()) {
        return NULL;
    }
    if (memory == NULL) {
        return oom_count(__real_malloc(nbytes));
    }
    return __real_realloc(memory, nbytes);
}

void __wrap_free(void *memory)
{
    if (memory != NULL) {
        atomic_fetch_sub(&oom_live, 1);
    }
    __real_free(memory);
}

/* Does all its work, checks that outputs are untouched where a call failed, and frees
 * whatever it made; returns the status of the first call that failed. */
typedef wsync_status_t (*oom_attempt_func_t)(void *context, wsync_error_t *err);

/* Repeats an attempt with the k-th allocation failing, k = 0, 1, ..., until one succeeds:
 * each must report NO_MEMORY and leak nothing.  Returns how many allocations were failed.
 */
static inline long oom_run(oom_attempt_func_t attempt, void *context)
{
    for (long k = 0;; k++) {
        const long live = atomic_load(&oom_live);
        wsync_error_t err = {0};
        wsync_status_t status;
        long left;

        atomic_store(&oom_left, k);
        status = attempt(context, &err);
        left = atomic_exchange(&oom_left, -1);
        if (atomic_load(&oom_live) != live) {
            FAIL("allocation %ld failing: %ld blocks before, %ld after", k, live,
                 atomic_load(&oom_live));
        }
        if (left >= 0) {
            CHECK_OK(status, err);
            (void)printf("%ld allocations failed in turn\n", k);
            CHECK(k > 0);
            return k;
        }
        if (status != WSYNC_ERR_NO_MEMORY) {
            FAIL("allocation %ld failing: status %d: %s", k, (int)status, err.message);
        }
        CHECK(err.message[0] != '\0');
    }
}

#endif
