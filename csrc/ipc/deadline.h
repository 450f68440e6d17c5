/* SPDX-License-Identifier: Apache-2.0
 * Milliseconds that are left of a timeout, for loops around poll. */
#ifndef WSYNC_IPC_DEADLINE_H
#define WSYNC_IPC_DEADLINE_H

#include <stdint.h>
#include <time.h>

static inline int64_t wsync_clock_ms(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* A negative timeout is one that has passed. */
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
