/* SPDX-License-Identifier: Apache-2.0
 * Host events: a 64-bit word in shared memory and a futex on its low half. */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "device/host.h"

/* The futex compares 32 bits.  A value that grew by exactly 2^32 between the load and the
 * sleep looks unchanged; so no sleep is longer than this. */
enum { SLEEP_NS = 50 * 1000 * 1000 };

static uint64_t now_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

uint64_t wsync_host_deadline(int timeout_ms)
{
    return now_ns() + (timeout_ms > 0 ? (uint64_t)timeout_ms * 1000000 : 0);
}

static uint64_t *event_word(wsync_event_t event)
{
    unsigned char *data = wsync_host_memory_data(event.memory);

    return (uint64_t *)(void *)(data + event.offset);
}

static uint32_t *low_half(uint64_t *word)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return (uint32_t *)(void *)word + 1;
#else
    return (uint32_t *)(void *)word;
#endif
}

wsync_status_t wsync_host_event_check(wsync_event_t event, wsync_error_t *err)
{
    const uint64_t nbytes = wsync_host_memory_nbytes(event.memory);

    if (event.offset % sizeof(uint64_t) != 0 || nbytes < sizeof(uint64_t) ||
        event.offset > nbytes - sizeof(uint64_t)) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_event",
                          "event at offset %" PRIu64
                          " is not an aligned 64-bit word of a memory of %" PRIu64 " bytes",
                          event.offset, nbytes);
    }
    return WSYNC_OK;
}

void wsync_host_event_set(wsync_event_t event, uint64_t value)
{
    uint64_t *word = event_word(event);
    uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);

    while (seen < value) {
        if (__atomic_compare_exchange_n(word, &seen, value, false, __ATOMIC_RELEASE,
                                        __ATOMIC_RELAXED)) {
            (void)syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
            return;
        }
    }
}

uint64_t wsync_host_event_query(wsync_event_t event)
{
    return __atomic_load_n(event_word(event), __ATOMIC_ACQUIRE);
}

wsync_status_t wsync_host_event_wait(wsync_event_t event, uint64_t value, int timeout_ms,
                                     wsync_error_t *err)
{
    const uint64_t deadline = wsync_host_deadline(timeout_ms);
    const wsync_status_t status = wsync_host_event_check(event, err);

    if (status != WSYNC_OK) {
        return status;
    }
    for (;;) {
        const uint64_t seen = wsync_host_event_query(event);
        const uint64_t now = now_ns();
        struct timespec sleep = {0};

        if (seen >= value) {
            return WSYNC_OK;
        }
        if (now >= deadline) {
            /* No time in the text: callers wait in slices. */
            return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, "wsync_event_wait",
                              "event at offset %" PRIu64 " is %" PRIu64
                              ", waited for %" PRIu64,
                              event.offset, seen, value);
        }
        sleep.tv_nsec = (long)(deadline - now < SLEEP_NS ? deadline - now : SLEEP_NS);
        if (syscall(SYS_futex, low_half(event_word(event)), FUTEX_WAIT, (uint32_t)seen,
                    &sleep, NULL, 0) != 0 &&
            errno != EAGAIN && errno != EINTR && errno != ETIMEDOUT) {
            return wsync_fail(err, WSYNC_ERR_OS, errno, "futex",
                              "event at offset %" PRIu64 ": futex: %s", event.offset,
                              strerror(errno));
        }
    }
}
