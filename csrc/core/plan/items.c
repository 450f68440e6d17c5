/* SPDX-License-Identifier: Apache-2.0
 * What is scheduled as a whole.  A tensor that somebody wants whole is never cut and drags
 * its keep-together group along; any other is cut where it exceeds a budget. */
#include <stdlib.h>
#include <string.h>

#include "core/base/counting_sort.h"
#include "core/base/divide.h"
#include "core/layout/layout_parts.h"
#include "core/plan/planner.h"

/* --- who wants what ------------------------------------------------------------------- */

/* Layouts of one model mostly have the same order, so the tensor after the one that was
 * found last is looked at before the table of names. */
static size_t find_tensor(const wsync_layout_t *layout, const char *name, size_t guess)
{
    if (guess < wsync_layout_tensor_count(layout) &&
        strcmp(wsync_layout_tensor(layout, guess)->name, name) == 0) {
        return guess;
    }
    return wsync_layout_find(layout, name);
}

/* Finds a destination's tensor in the source; *found is SIZE_MAX if nothing is wanted. */
static wsync_status_t match_tensor(const wsync_planner_t *planner, uint32_t destination,
                                   size_t tensor, size_t guess, size_t *found)
{
    const wsync_destination_t *wanted = &planner->spec->destinations[destination];
    const wsync_tensor_t *to = wsync_layout_tensor(wanted->layout, tensor);
    size_t count;

    (void)wsync_layout_shards(wanted->layout, tensor, &count);
    *found = SIZE_MAX;
    if (!wanted->whole && count == 0) {
        return WSYNC_OK;
    }
    *found = find_tensor(planner->spec->source, to->name, guess);
    if (*found == SIZE_MAX) {
        return wsync_fail(
            planner->err, WSYNC_ERR_LAYOUT, 0, "plan",
            "%.256s: worker %u asks for it, but the trainer has no such tensor", to->name,
            wsync_planner_first_worker(planner, destination));
    }
    return wsync_tensor_check_copy(wsync_layout_tensor(planner->spec->source, *found), to,
                                   "plan", planner->err);
}

typedef WSYNC_ARRAY(wsync_plan_ref_t) refs_t;

static wsync_status_t find_refs(const wsync_planner_t *planner, refs_t *found)
{
    for (uint32_t i = 0; i < planner->spec->destination_count; i++) {
        const wsync_layout_t *layout = planner->spec->destinations[i].layout;
        const size_t count = wsync_layout_tensor_count(layout);
        size_t guess = 0;

        if (planner->first_worker[i] == planner->first_worker[i + 1]) {
            continue; /* nobody takes it */
        }
        if (!WSYNC_ARRAY_RESERVE(*found, count)) {
            return wsync_no_memory(planner->err, "plan");
        }
        for (size_t j = 0; j < count; j++) {
            size_t source;
            const wsync_status_t status = match_tensor(planner, i, j, guess, &source);

            if (status != WSYNC_OK) {
                return status;
            }
            if (source != SIZE_MAX) {
                guess = source + 1;
                found->items[found->count++] =
                    (wsync_plan_ref_t){(uint32_t)source, i, (uint32_t)j};
            }
        }
    }
    return WSYNC_OK;
}

/* Whether a destination wants a tensor, and not boxes of it, in one piece. */
static bool wants_whole(const wsync_planner_t *planner, const wsync_plan_ref_t *ref)
{
    const wsync_destination_t *wanted = &planner->spec->destinations[ref->destination];
    const wsync_tensor_t *tensor = wsync_layout_tensor(wanted->layout, ref->tensor);
    const wsync_box_t whole = wsync_box_whole(tensor->ndim, tensor->shape);
    size_t count;
    const wsync_shard_t *shards = wsync_layout_shards(wanted->layout, ref->tensor, &count);

    return wanted->whole && (count == 0 || wsync_box_equal(&shards[0].box, &whole));
}

/* Sorts by source tensor, destinations ascending within one. */
static wsync_status_t collect_refs(wsync_planner_t *planner)
{
    const size_t count = wsync_layout_tensor_count(planner->spec->source);
    refs_t found = {0};
    wsync_status_t status = find_refs(planner, &found);
    const wsync_keyed_t keyed = {found.items, found.count, sizeof(*found.items),
                                 offsetof(wsync_plan_ref_t, source), count};

    if (status != WSYNC_OK) {
        goto cleanup;
    }
    planner->refs = wsync_sort_by_key(&keyed, &planner->first_ref);
    planner->whole = calloc(count + 1, sizeof(*planner->whole));
    if (planner->refs == NULL || planner->whole == NULL) {
        status = wsync_no_memory(planner->err, "plan");
        goto cleanup;
    }
    for (size_t i = 0; i < found.count; i++) {
        if (wants_whole(planner, &found.items[i])) {
            planner->whole[found.items[i].source] = true;
        }
    }

cleanup:
    free(found.items);
    return status;
}

/* --- keep-together groups ------------------------------------------------------------- */

/* A tensor is in group number `group` of a layout: a destination's, or the source's. */
typedef struct member {
    uint32_t layout; /* destination, or WSYNC_PLAN_NONE */
    uint32_t group;
    uint32_t tensor;
} member_t;

static int compare_members(const void *left, const void *right)
{
    const member_t *a = left;
    const member_t *b = right;
    int order = WSYNC_COMPARE(a->layout, b->layout);

    order = order != 0 ? order : WSYNC_COMPARE(a->group, b->group);
    return order != 0 ? order : WSYNC_COMPARE(a->tensor, b->tensor);
}

static uint32_t find_leader(const wsync_planner_t *planner, uint32_t tensor)
{
    while (planner->leader[tensor] != tensor) {
        planner->leader[tensor] = planner->leader[planner->leader[tensor]];
        tensor = planner->leader[tensor];
    }
    return tensor;
}

static void join(wsync_planner_t *planner, uint32_t a, uint32_t b)
{
    a = find_leader(planner, a);
    b = find_leader(planner, b);
    if (a < b) {
        planner->leader[b] = a;
    } else {
        planner->leader[a] = b;
    }
}

/* Groups matter to whole destinations only.  The source and every destination number their
 * groups on their own; a tensor that is in several groups joins them. */
static size_t collect_members(const wsync_planner_t *planner, member_t *members)
{
    const size_t count = wsync_layout_tensor_count(planner->spec->source);
    size_t used = 0;

    for (uint32_t i = 0; i < count; i++) {
        const uint32_t group = wsync_layout_tensor(planner->spec->source, i)->group;

        if (planner->whole[i] && group != 0) {
            members[used++] = (member_t){WSYNC_PLAN_NONE, group, i};
        }
        for (size_t j = planner->first_ref[i]; j < planner->first_ref[i + 1]; j++) {
            const wsync_plan_ref_t *ref = &planner->refs[j];
            const wsync_destination_t *destination =
                &planner->spec->destinations[ref->destination];
            const uint32_t wanted =
                wsync_layout_tensor(destination->layout, ref->tensor)->group;

            if (destination->whole && planner->whole[i] && wanted != 0) {
                members[used++] = (member_t){ref->destination, wanted, i};
            }
        }
    }
    return used;
}

static wsync_status_t make_groups(wsync_planner_t *planner)
{
    const uint32_t count = (uint32_t)wsync_layout_tensor_count(planner->spec->source);
    const size_t room = count + planner->first_ref[count] + 1;
    member_t *members = malloc(room * sizeof(*members));
    uint32_t *last = malloc((count + 1U) * sizeof(*last)); /* of every leader's group */
    wsync_status_t status = WSYNC_OK;
    size_t used;

    planner->leader = calloc(count + 1U, sizeof(*planner->leader));
    planner->next = malloc((count + 1U) * sizeof(*planner->next));
    if (members == NULL || last == NULL || planner->leader == NULL ||
        planner->next == NULL) {
        status = wsync_no_memory(planner->err, "plan");
        goto cleanup;
    }
    for (uint32_t i = 0; i < count; i++) {
        planner->leader[i] = i;
        planner->next[i] = WSYNC_PLAN_NONE;
        last[i] = i;
    }
    used = collect_members(planner, members);
    qsort(members, used, sizeof(*members), compare_members);
    for (size_t i = 1; i < used; i++) {
        if (members[i].layout == members[i - 1].layout &&
            members[i].group == members[i - 1].group) {
            join(planner, members[i - 1].tensor, members[i].tensor);
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t leader = find_leader(planner, i);

        planner->leader[i] = leader;
        if (leader != i) {
            planner->next[last[leader]] = i;
            last[leader] = i;
        }
    }

cleanup:
    free(members);
    free(last);
    return status;
}

/* --- items ---------------------------------------------------------------------------- */

/* Says which fixed budget cannot hold an item, if one cannot.  planner->use holds the item
 * alone. */
static wsync_status_t check_fixed(const wsync_planner_t *planner,
                                  const wsync_plan_item_t *item)
{
    const struct {
        const wsync_plan_budget_t *budget;
        const uint64_t *used;
        uint32_t count;
    } rows[] = {
        {&planner->ring, planner->use.slots, planner->spec->destination_count},
        {&planner->round, planner->use.slots, planner->spec->destination_count},
        {&planner->send, planner->use.sends, planner->spec->rank_count},
        {&planner->recv, planner->use.recvs, planner->spec->rank_count},
    };
    const wsync_plan_want_t *wants = planner->wants.items + item->first_want;
    const uint32_t last = wants[item->want_count - 1].tensor;
    const char *name = wsync_layout_tensor(planner->spec->source, wants[0].tensor)->name;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        for (uint32_t j = 0; j < rows[i].count && rows[i].budget->fixed; j++) {
            if (rows[i].used[j] > rows[i].budget->nbytes) {
                return wsync_fail(
                    planner->err, WSYNC_ERR_INVALID, 0, "plan",
                    "%s is %llu, but %.256s%s%.256s cannot be cut and needs %llu bytes",
                    rows[i].budget->name, (unsigned long long)rows[i].budget->nbytes, name,
                    last != wants[0].tensor ? " together with " : "",
                    last != wants[0].tensor
                        ? wsync_layout_tensor(planner->spec->source, last)->name
                        : "",
                    (unsigned long long)rows[i].used[j]);
            }
        }
    }
    return WSYNC_OK;
}

/* How many times the fullest budget is needed.  planner->use holds the item alone. */
static uint64_t count_parts(const wsync_planner_t *planner)
{
    uint64_t parts = 1;

    for (size_t i = 0; i < planner->use.touched_count; i++) {
        const uint32_t counter = planner->use.touched[i];
        const uint64_t need = wsync_ceil_divide(planner->use.slots[counter],
                                                wsync_plan_limit(planner, counter));

        parts = need > parts ? need : parts;
    }
    return parts;
}

static void add_weight(wsync_planner_t *planner, uint32_t rank, uint64_t nbytes)
{
    if (planner->weights[rank] == 0) {
        planner->touched[planner->touched_count++] = rank;
    }
    planner->weights[rank] += nbytes;
}

/* Finds the rank that serves most bytes of an item, and the item's size. */
static void weigh(wsync_planner_t *planner, wsync_plan_item_t *item)
{
    const wsync_plan_want_t *first = &planner->wants.items[item->first_want];
    const wsync_plan_want_t *last = first + item->want_count - 1;
    uint64_t best = 0;

    item->nbytes = 0;
    planner->touched_count = 0;
    for (size_t i = first->first_piece; i < last->first_piece + last->piece_count; i++) {
        const wsync_plan_piece_t *piece = &planner->pieces.items[i];
        size_t count;
        const uint32_t *locals = wsync_idsets_get(
            &planner->ranks, planner->classes.items[piece->class].locals, &count);

        item->nbytes += wsync_plan_pad(piece->nbytes);
        for (size_t j = 0; j < count; j++) {
            add_weight(planner, locals[j], piece->nbytes);
        }
        for (size_t j = 0; j < piece->send_count; j++) {
            add_weight(planner, planner->sends.items[piece->first_send + j].source,
                       piece->nbytes);
        }
    }
    for (uint32_t i = 0; i < planner->touched_count; i++) {
        const uint32_t rank = planner->touched[i];

        if (planner->weights[rank] > best ||
            (planner->weights[rank] == best && rank < item->owner)) {
            best = planner->weights[rank];
            item->owner = rank;
        }
        planner->weights[rank] = 0;
    }
}

/* Takes back the wants from `first_want` on. */
static void undo_wants(wsync_planner_t *planner, size_t first_want)
{
    const size_t first_piece = planner->wants.items[first_want].first_piece;

    for (size_t i = first_piece; i < planner->pieces.count; i++) {
        const wsync_plan_piece_t *piece = &planner->pieces.items[i];

        for (size_t j = 0; j < piece->send_count; j++) {
            const wsync_plan_send_t *send = &planner->sends.items[piece->first_send + j];

            planner->loads[send->source] -=
                piece->nbytes * planner->ranks.items[send->peers].count;
        }
    }
    if (first_piece < planner->pieces.count) {
        planner->sends.count = planner->pieces.items[first_piece].first_send;
    }
    planner->pieces.count = first_piece;
    planner->wants.count = first_want;
}

/* Makes an item of the wants from `first_want` on.  If it exceeds a budget and may be cut
 * it is taken back, and *parts says how many may fit; otherwise *parts is 0. */
static wsync_status_t add_item(wsync_planner_t *planner, size_t first_want, bool may_cut,
                               uint64_t *parts)
{
    wsync_plan_item_t item = {.first_want = first_want, .owner = WSYNC_PLAN_NONE};
    wsync_status_t status = WSYNC_OK;
    uint64_t least = planner->round.nbytes;
    uint64_t needed;

    *parts = 0;
    if (!WSYNC_ARRAY_RESERVE(planner->items, 1)) {
        return wsync_no_memory(planner->err, "plan");
    }
    item.want_count = (uint32_t)(planner->wants.count - first_want);
    weigh(planner, &item);
    /* No budget can see more than all bytes; most tensors are far below. */
    least = planner->send.nbytes < least ? planner->send.nbytes : least;
    least = planner->recv.nbytes < least ? planner->recv.nbytes : least;
    if (item.nbytes + (uint64_t)item.want_count * WSYNC_PLAN_ALIGN > least) {
        wsync_plan_use_set(planner, &item);
        needed = count_parts(planner);
        if (needed > 1 && may_cut) {
            *parts = needed;
        } else if (needed > 1) {
            status = check_fixed(planner, &item);
        }
        wsync_plan_use_clear(planner);
    }
    if (*parts == 0) {
        planner->items.items[planner->items.count++] = item;
    } else {
        undo_wants(planner, first_want);
    }
    return status;
}

/* Whether some destination of an audience wants its boxes whole. */
static bool stays_whole(const wsync_planner_t *planner, uint32_t audience)
{
    size_t count;
    const uint32_t *ids = wsync_idsets_get(&planner->audiences, audience, &count);
    bool found = false;

    for (size_t i = 0; i < count; i++) {
        found |= planner->spec->destinations[ids[i]].whole;
    }
    return found;
}

/* Makes items of one box, cut along its outermost dimensions until it fits. */
static wsync_status_t add_cut(wsync_planner_t *planner, uint32_t tensor,
                              const wsync_plan_demand_t *demand)
{
    const size_t first_want = planner->wants.count;
    wsync_plan_demand_t part = *demand;
    unsigned dim = 0;
    uint64_t parts;
    wsync_status_t status = wsync_plan_add_want(planner, tensor, demand);

    while (dim < WSYNC_MAX_NDIM && demand->box.extent[dim] == 1) {
        dim++;
    }
    dim = stays_whole(planner, demand->audience) ? WSYNC_MAX_NDIM : dim;
    if (status == WSYNC_OK) {
        status = add_item(planner, first_want, dim < WSYNC_MAX_NDIM, &parts);
    }
    if (status != WSYNC_OK || parts == 0) {
        return status;
    }
    if (parts > (uint64_t)demand->box.extent[dim]) {
        parts = (uint64_t)demand->box.extent[dim];
    }
    for (uint64_t i = 0; i < parts && status == WSYNC_OK; i++) {
        const int64_t share = demand->box.extent[dim] / (int64_t)parts;
        const int64_t longer = demand->box.extent[dim] % (int64_t)parts;
        const int64_t at = (int64_t)i;

        /* The first `longer` parts take one more. */
        part.box.start[dim] =
            demand->box.start[dim] + at * share + (at < longer ? at : longer);
        part.box.extent[dim] = share + (at < longer ? 1 : 0);
        status = add_cut(planner, tensor, &part);
    }
    return status;
}

static wsync_status_t add_empties(wsync_planner_t *planner, uint32_t tensor)
{
    if (!WSYNC_ARRAY_RESERVE(planner->empties, planner->demands.count)) {
        return wsync_no_memory(planner->err, "plan");
    }
    for (size_t i = 0; i < planner->demands.count; i++) {
        const wsync_plan_demand_t *demand = &planner->demands.items[i];

        planner->empties.items[planner->empties.count++] =
            (wsync_plan_want_t){.box = demand->box,
                                .tensor = tensor,
                                .audience = demand->audience,
                                .dtype = demand->dtype};
    }
    return WSYNC_OK;
}

/* Adds all that is wanted of a tensor to the wants. */
static wsync_status_t add_wants(wsync_planner_t *planner, uint32_t tensor)
{
    const wsync_tensor_t *what = wsync_layout_tensor(planner->spec->source, tensor);
    const wsync_box_t whole = wsync_box_whole(what->ndim, what->shape);
    wsync_status_t status = wsync_plan_load_tensor(planner, tensor);

    if (status == WSYNC_OK && wsync_box_count(&whole) == 0) {
        return add_empties(planner, tensor);
    }
    for (size_t i = 0; i < planner->demands.count && status == WSYNC_OK; i++) {
        status = wsync_plan_add_want(planner, tensor, &planner->demands.items[i]);
    }
    return status;
}

/* Makes the items of a tensor, or of the keep-together group that it leads. */
static wsync_status_t add_tensor(wsync_planner_t *planner, uint32_t tensor)
{
    const size_t first_want = planner->wants.count;
    uint64_t parts = 0;
    wsync_status_t status = WSYNC_OK;

    for (uint32_t i = tensor; i != WSYNC_PLAN_NONE && status == WSYNC_OK;
         i = planner->next[i]) {
        status = add_wants(planner, i);
    }
    if (status == WSYNC_OK && planner->wants.count > first_want) {
        status = add_item(planner, first_want, !planner->whole[tensor], &parts);
    }
    for (size_t i = 0; i < planner->demands.count && parts != 0 && status == WSYNC_OK;
         i++) {
        status = add_cut(planner, tensor, &planner->demands.items[i]);
    }
    return status;
}

wsync_status_t wsync_plan_make_items(wsync_planner_t *planner)
{
    const uint32_t count = (uint32_t)wsync_layout_tensor_count(planner->spec->source);
    wsync_status_t status = collect_refs(planner);

    if (status == WSYNC_OK) {
        status = make_groups(planner);
    }
    for (uint32_t i = 0; i < count && status == WSYNC_OK; i++) {
        /* NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult) */
        if (planner->leader[i] == i && planner->first_ref[i] < planner->first_ref[i + 1]) {
            status = add_tensor(planner, i);
        }
    }
    return status;
}
