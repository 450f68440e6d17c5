/* SPDX-License-Identifier: Apache-2.0
 * What keeps memory from being parked, as wsync_memory_pin of device.h has it: a count in
 * one word, which says PARKED instead while there is nothing to pin. */
#ifndef WSYNC_DEVICE_MEMORY_PINS_H
#define WSYNC_DEVICE_MEMORY_PINS_H

#include <limits.h>
#include <stdatomic.h>

#include "core/base/status.h"

typedef atomic_uint wsync_pins_t;

enum { WSYNC_PINS_PARKED = INT_MAX };

static inline wsync_status_t wsync_pins_add(wsync_pins_t *pins, wsync_error_t *err)
{
    unsigned count = atomic_load_explicit(pins, memory_order_relaxed);

    do {
        if (count == WSYNC_PINS_PARKED) {
            return wsync_fail(err, WSYNC_ERR_STATE, 0, "wsync_memory_pin",
                              "the memory is parked: there is nothing to look at");
        }
    } while (!atomic_compare_exchange_weak_explicit(
        pins, &count, count + 1, memory_order_acquire, memory_order_relaxed));
    return WSYNC_OK;
}

static inline void wsync_pins_drop(wsync_pins_t *pins)
{
    /* What was done with the bytes comes before the parking that sees the count fall. */
    (void)atomic_fetch_sub_explicit(pins, 1, memory_order_release);
}

/* Before the bytes go: from here on nobody can pin. */
static inline wsync_status_t wsync_pins_park(wsync_pins_t *pins, wsync_error_t *err)
{
    unsigned count = 0;

    if (atomic_compare_exchange_strong_explicit(
            pins, &count, WSYNC_PINS_PARKED, memory_order_acquire, memory_order_relaxed)) {
        return WSYNC_OK;
    }
    if (count == WSYNC_PINS_PARKED) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "wsync_memory_park",
                          "the memory is parked already");
    }
    return wsync_fail(err, WSYNC_ERR_STATE, 0, "wsync_memory_park",
                      "the memory cannot be parked: %u views of it are in use", count);
}

/* When the bytes are there again. */
static inline void wsync_pins_unpark(wsync_pins_t *pins)
{
    atomic_store_explicit(pins, 0, memory_order_release);
}

/* STATE unless parked. */
static inline wsync_status_t wsync_pins_check_parked(wsync_pins_t *pins, wsync_error_t *err)
{
    if (atomic_load_explicit(pins, memory_order_relaxed) != WSYNC_PINS_PARKED) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "wsync_memory_unpark",
                          "the memory is not parked");
    }
    return WSYNC_OK;
}

#endif
