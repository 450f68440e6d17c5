/* SPDX-License-Identifier: Apache-2.0
 * Division of counts and sizes that rounds up. */
#ifndef WSYNC_CORE_BASE_DIVIDE_H
#define WSYNC_CORE_BASE_DIVIDE_H

#include <stdint.h>

static inline uint64_t wsync_ceil_divide(uint64_t value, uint64_t by)
{
    return value / by + (value % by != 0);
}

/* The next multiple of `by`, or the value itself; the caller knows that it fits. */
static inline uint64_t wsync_round_up(uint64_t value, uint64_t by)
{
    return wsync_ceil_divide(value, by) * by;
}

#endif
