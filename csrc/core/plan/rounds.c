/* SPDX-License-Identifier: Apache-2.0
 * Items -> rounds: which items are delivered in which round. */
#include <stdlib.h>
#include <string.h>

#include "core/base/counting_sort.h"
#include "core/plan/planner.h"

enum {
    /* Rounds that items are still put into.  More of them find room for more, fewer keep
     * items nearer to their turn. */
    OPEN_ROUND_COUNT = 64,
};

/* --- what an item needs --------------------------------------------------------------- */

size_t wsync_plan_counter_count(const wsync_planner_t *planner)
{
    return planner->spec->destination_count + 2 * (size_t)planner->spec->rank_count;
}

uint64_t wsync_plan_limit(const wsync_planner_t *planner, size_t counter)
{
    const size_t first_send = planner->spec->destination_count;

    if (counter < first_send) {
        return planner->round.nbytes;
    }
    return counter < first_send + planner->spec->rank_count ? planner->send.nbytes
                                                            : planner->recv.nbytes;
}

static void add_need(wsync_plan_use_t *use, uint64_t *counter, uint64_t nbytes)
{
    if (*counter == 0) {
        use->touched[use->touched_count++] = (uint32_t)(counter - use->slots);
    }
    *counter += nbytes;
}

static void add_sends(wsync_planner_t *planner, const wsync_plan_piece_t *piece)
{
    wsync_plan_use_t *use = &planner->use;
    const uint64_t nbytes = wsync_plan_pad(piece->nbytes);

    for (size_t i = 0; i < piece->send_count; i++) {
        const wsync_plan_send_t *send = &planner->sends.items[piece->first_send + i];
        size_t count;
        const uint32_t *peers = wsync_idsets_get(&planner->ranks, send->peers, &count);

        add_need(use, &use->sends[send->source], nbytes);
        for (size_t j = 0; j < count; j++) {
            add_need(use, &use->recvs[peers[j]], nbytes);
        }
    }
}

void wsync_plan_use_set(wsync_planner_t *planner, const wsync_plan_item_t *item)
{
    wsync_plan_use_t *use = &planner->use;

    wsync_plan_use_clear(planner);
    for (size_t i = 0; i < item->want_count; i++) {
        const wsync_plan_want_t *want = &planner->wants.items[item->first_want + i];
        size_t count;
        const uint32_t *ids = wsync_idsets_get(&planner->audiences, want->audience, &count);

        for (size_t j = 0; j < count; j++) {
            add_need(use, &use->slots[ids[j]], wsync_plan_pad(want->nbytes));
        }
        for (size_t j = 0; j < want->piece_count; j++) {
            add_sends(planner, &planner->pieces.items[want->first_piece + j]);
        }
    }
}

void wsync_plan_use_clear(wsync_planner_t *planner)
{
    for (size_t i = 0; i < planner->use.touched_count; i++) {
        planner->use.slots[planner->use.touched[i]] = 0;
    }
    planner->use.touched_count = 0;
}

/* --- rounds that are open ------------------------------------------------------------- */

/* Round n has the counters n % OPEN_ROUND_COUNT.  The oldest closes for a new one. */
typedef struct open_rounds {
    uint64_t *used;
    size_t counter_count;
    size_t oldest;
    size_t count; /* of all rounds so far */
} open_rounds_t;

static uint64_t *used_in(const open_rounds_t *open, size_t round)
{
    return open->used + round % OPEN_ROUND_COUNT * open->counter_count;
}

static bool fits(const wsync_planner_t *planner, const uint64_t *used)
{
    const wsync_plan_use_t *use = &planner->use;

    for (size_t i = 0; i < use->touched_count; i++) {
        const uint32_t counter = use->touched[i];

        if (used[counter] + use->slots[counter] > wsync_plan_limit(planner, counter)) {
            return false;
        }
    }
    return true;
}

/* Puts what planner->use holds into the first round where it fits, or into a new one, which
 * it may exceed. */
static size_t put_in_round(const wsync_planner_t *planner, open_rounds_t *open)
{
    const wsync_plan_use_t *use = &planner->use;
    size_t round = open->oldest;
    uint64_t *used;

    while (round < open->count && !fits(planner, used_in(open, round))) {
        round++;
    }
    used = used_in(open, round);
    if (round == open->count) {
        memset(used, 0, open->counter_count * sizeof(*used));
        open->count++;
        open->oldest += open->count - open->oldest > OPEN_ROUND_COUNT;
    }
    for (size_t i = 0; i < use->touched_count; i++) {
        used[use->touched[i]] += use->slots[use->touched[i]];
    }
    return round;
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

    return WSYNC_COMPARE(left, right);
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
    int order = WSYNC_COMPARE(a->owner, b->owner);

    order = order != 0 ? order : WSYNC_COMPARE(a->audience, b->audience);
    return order != 0 ? order : WSYNC_COMPARE(a->item, b->item);
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
        return wsync_no_memory(planner->err, "plan");
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

/* The owner's stream that is least far, so that all destinations get something in turn. */
static stream_t *pick_stream(const owners_t *owners, const owner_t *owner)
{
    stream_t *best = &owners->streams[owner->first_stream];

    for (uint32_t i = 1; i < owner->stream_count; i++) {
        stream_t *stream = &owners->streams[owner->first_stream + i];

        if (compare_progress(&stream->progress, &best->progress) < 0) {
            best = stream;
        }
    }
    return best;
}

/* Takes the next item of the owner whose turn it is. */
static size_t owners_take(const wsync_planner_t *planner, owners_t *owners)
{
    owner_t *owner = &owners->heap[0];
    stream_t *stream = pick_stream(owners, owner);
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
    open_rounds_t open = {.counter_count = wsync_plan_counter_count(planner)};
    owners_t owners = {0};
    wsync_plan_turn_t *turns = calloc(count + 1, sizeof(*turns));
    wsync_status_t status;

    open.used = calloc(open.counter_count, OPEN_ROUND_COUNT * sizeof(*open.used));
    if (open.used == NULL || turns == NULL) {
        status = wsync_no_memory(planner->err, "plan");
        goto cleanup;
    }
    status = owners_init(planner, &owners);
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        turns[i].item = owners_take(planner, &owners);
        wsync_plan_use_set(planner, &planner->items.items[turns[i].item]);
        turns[i].round = (uint32_t)put_in_round(planner, &open);
    }
    if (status == WSYNC_OK) {
        const wsync_keyed_t keyed = {turns, count, sizeof(*turns),
                                     offsetof(wsync_plan_turn_t, round), open.count};

        planner->round_count = (uint32_t)open.count;
        planner->turns = wsync_sort_by_key(&keyed, &planner->first_in_round);
        if (planner->turns == NULL) {
            status = wsync_no_memory(planner->err, "plan");
        }
    }

cleanup:
    free(open.used);
    free(turns);
    owners_fini(&owners);
    return status;
}
