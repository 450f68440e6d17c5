/* SPDX-License-Identifier: Apache-2.0
 * Which replica serves which workers.  What depends only on who wants a piece and who holds
 * it is worked out once per pair of such sets (a class), so that a piece costs as much as
 * it has replicas, however many workers there are. */
#include <stdlib.h>
#include <string.h>

#include "core/base/counting_sort.h"
#include "core/plan/planner.h"

/* --- audiences ------------------------------------------------------------------------ */

static int compare_ids(const void *left, const void *right)
{
    const uint32_t *a = left;
    const uint32_t *b = right;

    return WSYNC_COMPARE(*a, *b);
}

/* The homes of all workers behind a set of destinations. */
static wsync_status_t find_homes(wsync_planner_t *planner, const uint32_t *ids,
                                 size_t count, wsync_plan_audience_t *info)
{
    wsync_plan_ids_t *homes = &planner->more_ids;
    size_t unique = 0;

    homes->count = 0;
    for (size_t i = 0; i < count; i++) {
        const size_t first = planner->first_worker[ids[i]];
        const size_t end = planner->first_worker[ids[i] + 1];

        if (!WSYNC_ARRAY_RESERVE(*homes, end - first)) {
            return wsync_no_memory(planner->err, "plan");
        }
        for (size_t j = first; j < end; j++) {
            homes->items[homes->count++] = planner->workers[j].home;
        }
    }
    info->worker_count = (uint32_t)homes->count;
    qsort(homes->items, homes->count, sizeof(*homes->items), compare_ids);
    for (size_t i = 0; i < homes->count; i++) {
        if (i == 0 || homes->items[i] != homes->items[i - 1]) {
            homes->items[unique++] = homes->items[i];
        }
    }
    return wsync_idsets_add(&planner->ranks, homes->items, unique, &info->homes,
                            planner->err);
}

wsync_status_t wsync_plan_audience(wsync_planner_t *planner, const uint32_t *ids,
                                   size_t count, uint32_t *audience)
{
    wsync_plan_audience_t info = {0};
    uint32_t index;
    wsync_status_t status =
        wsync_idsets_add(&planner->audiences, ids, count, &index, planner->err);

    if (status == WSYNC_OK && index == planner->audience_info.count) {
        if (!WSYNC_ARRAY_RESERVE(planner->audience_info, 1)) {
            return wsync_no_memory(planner->err, "plan");
        }
        status = find_homes(planner, ids, count, &info);
        if (status == WSYNC_OK) {
            planner->audience_info.items[planner->audience_info.count++] = info;
        }
    }
    if (status == WSYNC_OK) {
        *audience = index;
    }
    return status;
}

/* --- classes -------------------------------------------------------------------------- */

typedef struct placed {
    uint32_t host;
    uint32_t rank;
} placed_t;

/* What make_class works on: ranks by host, then rank. */
typedef struct class_scratch {
    placed_t *needy; /* homes that do not hold the piece */
    placed_t *holders;
    size_t needy_count;
    size_t holder_count;
    uint32_t *ids; /* room for all of both */
    uint32_t *rest;
    size_t rest_count;
} class_scratch_t;

static int compare_placed(const void *left, const void *right)
{
    const placed_t *a = left;
    const placed_t *b = right;
    const int hosts = WSYNC_COMPARE(a->host, b->host);

    return hosts != 0 ? hosts : WSYNC_COMPARE(a->rank, b->rank);
}

static wsync_status_t add_group(wsync_planner_t *planner, wsync_plan_class_t *class,
                                const uint32_t *peers, size_t peer_count,
                                const uint32_t *candidates, size_t candidate_count)
{
    wsync_plan_group_t group = {.with_rest = WSYNC_PLAN_NONE};
    wsync_status_t status;

    if (!WSYNC_ARRAY_RESERVE(planner->groups, 1)) {
        return wsync_no_memory(planner->err, "plan");
    }
    status =
        wsync_idsets_add(&planner->ranks, peers, peer_count, &group.peers, planner->err);
    if (status == WSYNC_OK) {
        status = wsync_idsets_add(&planner->ranks, candidates, candidate_count,
                                  &group.candidates, planner->err);
    }
    if (status == WSYNC_OK) {
        planner->groups.items[planner->groups.count++] = group;
        class->group_count++;
    }
    return status;
}

/* Homes whose host holds a replica become a group of their own, the others the rest. */
static wsync_status_t add_groups(wsync_planner_t *planner, wsync_plan_class_t *class,
                                 class_scratch_t *scratch)
{
    wsync_status_t status = WSYNC_OK;
    size_t holder = 0;
    size_t end;

    for (size_t i = 0; i < scratch->needy_count && status == WSYNC_OK; i = end) {
        const uint32_t host = scratch->needy[i].host;
        size_t used = 0;
        size_t peers;

        for (end = i; end < scratch->needy_count && scratch->needy[end].host == host;
             end++) {
            scratch->ids[used++] = scratch->needy[end].rank;
        }
        peers = used;
        while (holder < scratch->holder_count && scratch->holders[holder].host < host) {
            holder++;
        }
        for (; holder < scratch->holder_count && scratch->holders[holder].host == host;
             holder++) {
            scratch->ids[used++] = scratch->holders[holder].rank;
        }
        if (used > peers) {
            status = add_group(planner, class, scratch->ids, peers, scratch->ids + peers,
                               used - peers);
        } else {
            memcpy(scratch->rest + scratch->rest_count, scratch->ids,
                   peers * sizeof(*scratch->rest));
            scratch->rest_count += peers;
        }
    }
    if (status == WSYNC_OK && scratch->rest_count > 0) {
        for (size_t i = 0; i < scratch->holder_count; i++) {
            scratch->ids[i] = scratch->holders[i].rank;
        }
        qsort(scratch->ids, scratch->holder_count, sizeof(*scratch->ids), compare_ids);
        qsort(scratch->rest, scratch->rest_count, sizeof(*scratch->rest), compare_ids);
        status = add_group(planner, class, scratch->rest, scratch->rest_count, scratch->ids,
                           scratch->holder_count);
        class->has_rest = true;
    }
    return status;
}

/* Splits the audience's homes into those that hold the piece and the needy ones. */
static wsync_status_t split_homes(wsync_planner_t *planner, wsync_plan_class_t *class,
                                  class_scratch_t *scratch)
{
    const uint32_t *hosts = planner->spec->hosts;
    const uint32_t home_set = planner->audience_info.items[class->audience].homes;
    size_t home_count;
    size_t holder_count;
    const uint32_t *homes = wsync_idsets_get(&planner->ranks, home_set, &home_count);
    const uint32_t *holders =
        wsync_idsets_get(&planner->ranks, class->holders, &holder_count);
    size_t locals = 0;

    for (size_t i = 0, j = 0; i < home_count; i++) {
        while (j < holder_count && holders[j] < homes[i]) {
            j++;
        }
        if (j < holder_count && holders[j] == homes[i]) {
            scratch->ids[locals++] = homes[i];
        } else {
            scratch->needy[scratch->needy_count++] = (placed_t){hosts[homes[i]], homes[i]};
        }
    }
    for (size_t i = 0; i < holder_count; i++) {
        scratch->holders[i] = (placed_t){hosts[holders[i]], holders[i]};
    }
    scratch->holder_count = holder_count;
    qsort(scratch->needy, scratch->needy_count, sizeof(placed_t), compare_placed);
    qsort(scratch->holders, scratch->holder_count, sizeof(placed_t), compare_placed);
    return wsync_idsets_add(&planner->ranks, scratch->ids, locals, &class->locals,
                            planner->err);
}

static wsync_status_t make_class(wsync_planner_t *planner, uint32_t audience,
                                 uint32_t holders, wsync_plan_class_t *made)
{
    const uint32_t homes = planner->audience_info.items[audience].homes;
    const size_t room =
        planner->ranks.items[homes].count + (size_t)planner->ranks.items[holders].count + 1;
    wsync_plan_class_t class = {
        .audience = audience, .holders = holders, .first_group = planner->groups.count};
    /* a third each: needy, holders, and both lists of ids */
    placed_t *memory = malloc(3 * room * sizeof(*memory));
    class_scratch_t scratch = {0};
    wsync_status_t status;

    if (memory == NULL) {
        return wsync_no_memory(planner->err, "plan");
    }
    scratch.needy = memory;
    scratch.holders = memory + room;
    scratch.ids = (uint32_t *)(memory + 2 * room);
    scratch.rest = scratch.ids + room;
    status = split_homes(planner, &class, &scratch);
    if (status == WSYNC_OK) {
        status = add_groups(planner, &class, &scratch);
    }
    if (status == WSYNC_OK) {
        *made = class;
    }
    free(memory);
    return status;
}

static wsync_status_t find_class(wsync_planner_t *planner, uint32_t audience,
                                 uint32_t holders, uint32_t *index)
{
    const uint64_t key = (uint64_t)audience << 32 | holders;
    wsync_plan_class_t class = {0};
    wsync_status_t status;

    *index = wsync_table_find(&planner->class_table, key);
    if (*index != WSYNC_TABLE_NONE) {
        return WSYNC_OK;
    }
    status = make_class(planner, audience, holders, &class);
    if (status != WSYNC_OK) {
        return status;
    }
    if (!WSYNC_ARRAY_RESERVE(planner->classes, 1) ||
        !wsync_table_add(&planner->class_table, key)) {
        return wsync_no_memory(planner->err, "plan");
    }
    *index = (uint32_t)planner->classes.count;
    planner->classes.items[planner->classes.count++] = class;
    return WSYNC_OK;
}

/* --- choice --------------------------------------------------------------------------- */

static uint32_t least_loaded(const wsync_planner_t *planner, uint32_t candidates)
{
    size_t count;
    const uint32_t *ranks = wsync_idsets_get(&planner->ranks, candidates, &count);
    uint32_t best = ranks[0];

    for (size_t i = 1; i < count; i++) {
        if (planner->loads[ranks[i]] < planner->loads[best]) {
            best = ranks[i];
        }
    }
    return best;
}

/* The union of a group's peers and the rest's. */
static wsync_status_t join_rest(wsync_planner_t *planner, wsync_plan_group_t *group,
                                uint32_t rest)
{
    wsync_plan_ids_t *joined = &planner->more_ids;
    size_t a_count;
    size_t b_count;
    const uint32_t *a = wsync_idsets_get(&planner->ranks, group->peers, &a_count);
    const uint32_t *b = wsync_idsets_get(&planner->ranks, rest, &b_count);

    joined->count = 0;
    if (!WSYNC_ARRAY_RESERVE(*joined, a_count + b_count)) {
        return wsync_no_memory(planner->err, "plan");
    }
    for (size_t i = 0, j = 0; i < a_count || j < b_count;) {
        const bool first = j == b_count || (i < a_count && a[i] < b[j]);

        joined->items[joined->count++] = first ? a[i++] : b[j++];
    }
    return wsync_idsets_add(&planner->ranks, joined->items, joined->count,
                            &group->with_rest, planner->err);
}

/* One message where the rest's source serves a host's group already. */
static wsync_status_t add_rest(wsync_planner_t *planner, const wsync_plan_class_t *class,
                               uint32_t source, wsync_plan_piece_t *piece)
{
    const uint32_t rest =
        planner->groups.items[class->first_group + class->group_count - 1].peers;

    for (uint32_t i = 0; i < piece->send_count; i++) {
        wsync_plan_send_t *send = &planner->sends.items[piece->first_send + i];
        wsync_plan_group_t *group = &planner->groups.items[class->first_group + i];

        if (send->source == source) {
            if (group->with_rest == WSYNC_PLAN_NONE) {
                const wsync_status_t status = join_rest(planner, group, rest);

                if (status != WSYNC_OK) {
                    return status;
                }
            }
            send->peers = group->with_rest;
            return WSYNC_OK;
        }
    }
    planner->sends.items[planner->sends.count++] =
        (wsync_plan_send_t){.source = source, .peers = rest};
    piece->send_count++;
    return WSYNC_OK;
}

wsync_status_t wsync_plan_choose(wsync_planner_t *planner, uint32_t audience,
                                 uint32_t holders, wsync_plan_piece_t *piece)
{
    const wsync_plan_class_t *class;
    wsync_status_t status = find_class(planner, audience, holders, &piece->class);

    if (status != WSYNC_OK) {
        return status;
    }
    class = &planner->classes.items[piece->class];
    piece->first_send = planner->sends.count;
    piece->send_count = 0;
    if (class->group_count == 0) {
        return WSYNC_OK;
    }
    if (!WSYNC_ARRAY_RESERVE(planner->sends, class->group_count)) {
        return wsync_no_memory(planner->err, "plan");
    }
    for (uint32_t i = 0; i < class->group_count && status == WSYNC_OK; i++) {
        const wsync_plan_group_t *group = &planner->groups.items[class->first_group + i];
        const uint32_t source = least_loaded(planner, group->candidates);

        planner->loads[source] += piece->nbytes * planner->ranks.items[group->peers].count;
        if (class->has_rest && i == class->group_count - 1) {
            status = add_rest(planner, class, source, piece);
        } else {
            planner->sends.items[planner->sends.count++] =
                (wsync_plan_send_t){.source = source, .peers = group->peers};
            piece->send_count++;
        }
    }
    return status;
}
