/* SPDX-License-Identifier: Apache-2.0
 * Order: items into rounds, rounds into rings. */
#include <stdlib.h>
#include <string.h>

#include "core/plan_internal.h"

/* --- what a round uses ---------------------------------------------------------------- */

static bool add_sends(wsync_planner_t *planner, const wsync_plan_piece_t *piece)
{
    const uint64_t nbytes = wsync_plan_pad(piece->nbytes);
    bool fits = true;

    for (size_t i = 0; i < piece->send_count; i++) {
        const wsync_plan_send_t *send = &planner->sends.items[piece->first_send + i];
        size_t count;
        const uint32_t *peers = wsync_idsets_get(&planner->ranks, send->peers, &count);
        uint64_t most = 0;

        planner->use.sends[send->source] += nbytes;
        for (size_t j = 0; j < count; j++) {
            const uint64_t used = planner->use.recvs[peers[j]] += nbytes;

            most = used > most ? used : most;
        }
        fits = fits && most <= planner->recv.nbytes &&
               planner->use.sends[send->source] <= planner->send.nbytes;
    }
    return fits;
}

bool wsync_plan_use_add(wsync_planner_t *planner, const wsync_plan_item_t *item)
{
    bool fits = true;

    for (size_t i = 0; i < item->want_count; i++) {
        const wsync_plan_want_t *want = &planner->wants.items[item->first_want + i];
        size_t count;
        const uint32_t *ids = wsync_idsets_get(&planner->audiences, want->audience, &count);

        for (size_t j = 0; j < count; j++) {
            planner->use.slots[ids[j]] += wsync_plan_pad(want->nbytes);
            fits = fits && planner->use.slots[ids[j]] <= planner->round.nbytes;
        }
        for (size_t j = 0; j < want->piece_count; j++) {
            fits &= add_sends(planner, &planner->pieces.items[want->first_piece + j]);
        }
    }
    return fits;
}

void wsync_plan_use_clear(wsync_planner_t *planner)
{
    const size_t rank_count = planner->spec->rank_count;

    memset(planner->use.slots, 0,
           planner->spec->destination_count * sizeof(*planner->use.slots));
    memset(planner->use.sends, 0, rank_count * sizeof(*planner->use.sends));
    memset(planner->use.recvs, 0, rank_count * sizeof(*planner->use.recvs));
}

/* --- whose turn it is ----------------------------------------------------------------- */

/* How far something has got. */
typedef struct progress {
    uint64_t done; /* bytes that are scheduled */
    uint64_t total;
} progress_t;

/* Items of one owner for the same destinations, in their order. */
typedef struct stream {
    progress_t progress;
    size_t next; /* in entries */
    size_t end;
} stream_t;

/* A rank and the streams that it has left. */
typedef struct owner {
    progress_t progress;
    uint32_t rank;
    uint32_t stream_count;
    size_t first_stream;
} owner_t;

typedef struct entry {
    uint32_t owner;
    uint32_t audience; /* WSYNC_PLAN_NONE where an item has several */
    size_t item;
} entry_t;

/* Owners that have items left, a heap: the one to go next is first. */
typedef struct owners {
    owner_t *heap;
    size_t count;
    stream_t *streams; /* by owner */
    entry_t *entries;  /* by stream */
} owners_t;

__extension__ typedef unsigned __int128 wide_t;

/* -1, 0 or 1: the fraction a is smaller than b, equal or larger. */
static int compare_progress(const progress_t *a, const progress_t *b)
{
    const wide_t left = (wide_t)a->done * b->total;
    const wide_t right = (wide_t)b->done * a->total;

    return (left > right) - (left < right);
}

static bool goes_before(const owner_t *a, const owner_t *b)
{
    const int order = compare_progress(&a->progress, &b->progress);

    return order != 0 ? order < 0 : a->rank < b->rank;
}

static void sift_down(owners_t *owners, size_t at)
{
    for (;;) {
        size_t least = at;
        owner_t swap;

        for (size_t child = 2 * at + 1; child <= 2 * at + 2; child++) {
            if (child < owners->count &&
                goes_before(&owners->heap[child], &owners->heap[least])) {
                least = child;
            }
        }
        if (least == at) {
            return;
        }
        swap = owners->heap[at];
        owners->heap[at] = owners->heap[least];
        owners->heap[least] = swap;
        at = least;
    }
}

static int compare_entries(const void *left, const void *right)
{
    const entry_t *a = left;
    const entry_t *b = right;

    if (a->owner != b->owner) {
        return a->owner < b->owner ? -1 : 1;
    }
    if (a->audience != b->audience) {
        return a->audience < b->audience ? -1 : 1;
    }
    return (a->item > b->item) - (a->item < b->item);
}

static void owners_fini(owners_t *owners)
{
    free(owners->heap);
    free(owners->streams);
    free(owners->entries);
}

/* Cuts the sorted entries into streams, and those into owners. */
static void split_entries(const wsync_planner_t *planner, owners_t *owners)
{
    size_t stream_count = 0;

    for (size_t i = 0; i < planner->items.count; i++) {
        const entry_t *entry = &owners->entries[i];
        const bool new_owner = i == 0 || entry->owner != entry[-1].owner;
        const uint64_t nbytes = planner->items.items[entry->item].nbytes;
        stream_t *stream;
        owner_t *owner;

        if (new_owner) {
            owners->heap[owners->count++] =
                (owner_t){.rank = entry->owner, .first_stream = stream_count};
        }
        owner = &owners->heap[owners->count - 1];
        if (new_owner || entry->audience != entry[-1].audience) {
            owners->streams[stream_count++] = (stream_t){.next = i};
            owner->stream_count++;
        }
        stream = &owners->streams[stream_count - 1];
        stream->end = i + 1;
        stream->progress.total += nbytes;
        owner->progress.total += nbytes;
    }
}

static wsync_status_t owners_init(const wsync_planner_t *planner, owners_t *owners)
{
    const size_t count = planner->items.count;

    owners->heap = calloc(planner->spec->rank_count + 1U, sizeof(*owners->heap));
    owners->streams = calloc(count + 1, sizeof(*owners->streams));
    owners->entries = calloc(count + 1, sizeof(*owners->entries));
    if (owners->heap == NULL || owners->streams == NULL || owners->entries == NULL) {
        return wsync_plan_no_memory(planner, "items", count);
    }
    for (size_t i = 0; i < count; i++) {
        const wsync_plan_item_t *item = &planner->items.items[i];

        owners->entries[i] = (entry_t){item->owner,
                                       item->want_count == 1
                                           ? planner->wants.items[item->first_want].audience
                                           : WSYNC_PLAN_NONE,
                                       i};
    }
    qsort(owners->entries, count, sizeof(*owners->entries), compare_entries);
    /* All fractions are zero: ascending ranks are a heap. */
    split_entries(planner, owners);
    return WSYNC_OK;
}

/* How full the fullest slot is that an item goes to. */
static uint64_t fill_before(const wsync_planner_t *planner, size_t index)
{
    const wsync_plan_item_t *item = &planner->items.items[index];
    uint64_t most = 0;

    for (size_t i = 0; i < item->want_count; i++) {
        size_t count;
        const uint32_t *ids =
            wsync_idsets_get(&planner->audiences,
                             planner->wants.items[item->first_want + i].audience, &count);

        for (size_t j = 0; j < count; j++) {
            /* NOLINTNEXTLINE(clang-analyzer-core.uninitialized.ArraySubscript) */
            const uint64_t used = planner->use.slots[ids[j]];

            most = used > most ? used : most;
        }
    }
    return most;
}

/* The owner's stream whose destinations have got least in this round, so that all of them
 * get something in every round; then the one that is least far. */
static stream_t *pick_stream(const wsync_planner_t *planner, const owners_t *owners,
                             const owner_t *owner)
{
    stream_t *best = &owners->streams[owner->first_stream];
    uint64_t least;

    if (owner->stream_count == 1) {
        return best;
    }
    least = fill_before(planner, owners->entries[best->next].item);
    for (uint32_t i = 1; i < owner->stream_count; i++) {
        stream_t *stream = &owners->streams[owner->first_stream + i];
        const uint64_t fill = fill_before(planner, owners->entries[stream->next].item);

        if (fill < least ||
            (fill == least && compare_progress(&stream->progress, &best->progress) < 0)) {
            best = stream;
            least = fill;
        }
    }
    return best;
}

/* Takes the next item of the owner whose turn it is. */
static size_t owners_take(const wsync_planner_t *planner, owners_t *owners)
{
    owner_t *owner = &owners->heap[0];
    stream_t *stream = pick_stream(planner, owners, owner);
    const size_t item = owners->entries[stream->next++].item;

    stream->progress.done += planner->items.items[item].nbytes;
    owner->progress.done += planner->items.items[item].nbytes;
    if (stream->next == stream->end) {
        *stream = owners->streams[owner->first_stream + --owner->stream_count];
    }
    if (owner->stream_count == 0) {
        owners->heap[0] = owners->heap[--owners->count];
    }
    sift_down(owners, 0);
    return item;
}

wsync_status_t wsync_plan_make_rounds(wsync_planner_t *planner)
{
    const size_t count = planner->items.count;
    owners_t owners = {0};
    wsync_status_t status = owners_init(planner, &owners);

    planner->order = malloc((count + 1) * sizeof(*planner->order));
    if (status == WSYNC_OK && planner->order == NULL) {
        status = wsync_plan_no_memory(planner, "items", count);
    }
    wsync_plan_use_clear(planner);
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        const size_t index = owners_take(planner, &owners);
        const wsync_plan_item_t *item = &planner->items.items[index];
        const bool fits = wsync_plan_use_add(planner, item);

        planner->order[i] = index;
        if (i > 0 && fits) {
            continue;
        }
        if (i > 0) {
            wsync_plan_use_clear(planner);
            (void)wsync_plan_use_add(planner, item);
        }
        if (!WSYNC_PLAN_RESERVE(planner->first_in_round, 2)) {
            status = wsync_plan_no_memory(planner, "rounds", planner->first_in_round.count);
        } else {
            planner->first_in_round.items[planner->first_in_round.count++] = i;
        }
    }
    if (status == WSYNC_OK && WSYNC_PLAN_RESERVE(planner->first_in_round, 1)) {
        planner->first_in_round.items[planner->first_in_round.count++] = count;
    } else if (status == WSYNC_OK) {
        status = wsync_plan_no_memory(planner, "rounds", 1);
    }
    owners_fini(&owners);
    return status;
}

/* --- rings ---------------------------------------------------------------------------- */

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
    const size_t round_count = planner->first_in_round.count - 1;

    plan->round_count = (uint32_t)round_count;
    plan->slots = calloc(destination_count * round_count + 1, sizeof(*plan->slots));
    plan->rings = calloc(destination_count + 1, sizeof(*plan->rings));
    if (plan->slots == NULL || plan->rings == NULL) {
        return wsync_plan_no_memory(planner, "slots", destination_count * round_count);
    }
    for (size_t round = 0; round < round_count; round++) {
        for (size_t i = planner->first_in_round.items[round];
             i < planner->first_in_round.items[round + 1]; i++) {
            const wsync_plan_item_t *item = &planner->items.items[planner->order[i]];

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
