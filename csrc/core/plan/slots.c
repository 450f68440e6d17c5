/* SPDX-License-Identifier: Apache-2.0
 * Rounds -> slots: how large every ring is, and where in it each round lies. */
#include <stdlib.h>

#include "core/plan/planner.h"

enum {
    /* Of a ring whose rounds are small: were there four of them, both sides would wait for
     * each other at nearly every one. */
    MIN_RING_NBYTES = 256 * 1024,
};

/* a + b, or the largest number. */
static uint64_t add_up(uint64_t a, uint64_t b)
{
    uint64_t sum;

    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

/* What a destination's ring must hold, from the sizes of its slots. */
static uint64_t ring_size(const wsync_planner_t *planner, const wsync_slot_t *slots,
                          size_t count)
{
    const uint64_t half = add_up(planner->round.nbytes, planner->round.nbytes);
    uint64_t wanted = planner->ring.fixed ? planner->ring.nbytes : add_up(half, half);
    uint64_t total = 0;

    if (!planner->ring.fixed && wanted < MIN_RING_NBYTES) {
        wanted = MIN_RING_NBYTES;
    }

    for (size_t i = 0; i < count; i++) {
        const uint64_t pair = add_up(slots[i].nbytes, i > 0 ? slots[i - 1].nbytes : 0);

        if (!planner->ring.fixed && pair > wanted) {
            wanted = pair;
        }
        total = add_up(total, slots[i].nbytes);
    }
    return total < wanted ? total : wanted;
}

/* Slots follow each other and start again at 0 where the rest of the ring is too small. The
 * oldest slots lie ahead in the ring, so a pointer to the oldest one that is not yet waited
 * for is enough. */
static void place_slots(wsync_slot_t *slots, size_t count, uint64_t ring_nbytes)
{
    uint64_t end = 0;
    int64_t wait_round = -1;
    size_t oldest = 0; /* first slot of the lap before that is not waited for */
    size_t lap = 0;    /* first slot of this lap */

    for (size_t i = 0; i < count; i++) {
        if (slots[i].nbytes > ring_nbytes - end) {
            end = 0;
            /* What remains of the lap before last is older than what is waited for now. */
            oldest = lap;
            lap = i;
        }
        slots[i].offset = end;
        end += slots[i].nbytes;
        while (oldest < lap && slots[i].nbytes != 0 && slots[oldest].offset < end) {
            wait_round = (int64_t)oldest;
            oldest++;
        }
        slots[i].wait_round = wait_round;
    }
}

wsync_status_t wsync_plan_make_rings(wsync_planner_t *planner, wsync_plan_t *plan)
{
    const size_t destination_count = planner->spec->destination_count;
    const size_t round_count = planner->round_count;

    plan->round_count = planner->round_count;
    plan->round_nbytes = planner->round.nbytes;
    plan->slots = calloc(destination_count * round_count + 1, sizeof(*plan->slots));
    plan->rings = calloc(destination_count + 1, sizeof(*plan->rings));
    if (plan->slots == NULL || plan->rings == NULL) {
        return wsync_no_memory(planner->err, "plan");
    }
    for (size_t round = 0; round < round_count; round++) {
        for (size_t i = planner->first_in_round[round];
             i < planner->first_in_round[round + 1]; i++) {
            const wsync_plan_item_t *item = &planner->items.items[planner->turns[i].item];

            for (size_t j = 0; j < item->want_count; j++) {
                const wsync_plan_want_t *want = &planner->wants.items[item->first_want + j];
                size_t count;
                const uint32_t *ids =
                    wsync_idsets_get(&planner->audiences, want->audience, &count);

                for (size_t k = 0; k < count; k++) {
                    plan->slots[ids[k] * round_count + round].nbytes +=
                        wsync_plan_pad(want->nbytes);
                }
            }
        }
    }
    for (size_t i = 0; i < destination_count; i++) {
        wsync_slot_t *slots = plan->slots + i * round_count;

        plan->rings[i] = ring_size(planner, slots, round_count);
        place_slots(slots, round_count, plan->rings[i]);
    }
    return WSYNC_OK;
}
