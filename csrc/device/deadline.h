/* SPDX-License-Identifier: Apache-2.0
 * What is left of a timeout, on CLOCK_MONOTONIC.  A negative timeout is one that has
 * passed. */
#ifndef WSYNC_DEVICE_DEADLINE_H
#define WSYNC_DEVICE_DEADLINE_H

#include <stdint.h>
#include <time.h>

static inline uint64_t wsync_clock_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static inline uint64_t wsync_deadline_ns(int timeout_ms)
{
    return wsync_clock_ns() + (timeout_ms > 0 ? (uint64_t)timeout_ms * 1000000 : 0);
}

static inline int64_t wsync_clock_ms(void)
{
    return (int64_t)(wsync_clock_ns() / 1000000);
}

static inline int64_t wsync_deadline_ms(int timeout_ms)
{
    return wsync_clock_ms() + (timeout_ms > 0 ? timeout_ms : 0);
}

/* 0 once the deadline has passed; never more than most_ms. */
static inline int wsync_left_ms(int64_t deadline_ms, int most_ms)
{
    const int64_t left = deadline_ms - wsync_clock_ms();

    return left <= 0 ? 0 : left < most_ms ? (int)left : most_ms;
}

#endif
