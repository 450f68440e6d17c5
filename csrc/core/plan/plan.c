/* SPDX-License-Identifier: Apache-2.0
 * Plans: how one is made, and the accessors. */
#include "core/plan/plan.h"

#include <stdlib.h>

#include "core/base/counting_sort.h"
#include "core/plan/planner.h"

static const uint64_t default_round_nbytes = UINT64_C(32) << 20;

/* --- making --------------------------------------------------------------------------- */

static wsync_status_t check_spec(const wsync_plan_spec_t *spec, wsync_error_t *err)
{
    const uint32_t source_ranks = wsync_layout_rank_count(spec->source);

    if (spec->rank >= spec->rank_count || spec->rank_count > WSYNC_MAX_RANKS) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "plan",
                          "rank %u must be below the number of ranks, %u (at most %d)",
                          spec->rank, spec->rank_count, WSYNC_MAX_RANKS);
    }
    if (source_ranks > spec->rank_count) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "plan",
                          "the source layout has shards on rank %u, the plan has %u ranks",
                          source_ranks - 1, spec->rank_count);
    }
    for (uint32_t i = 0; i < spec->worker_count; i++) {
        const wsync_worker_t *worker = &spec->workers[i];

        if (worker->destination >= spec->destination_count ||
            worker->home >= spec->rank_count) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "plan",
                              "worker %u: destination %u and rank %u must be below %u "
                              "destinations and %u ranks",
                              i, worker->destination, worker->home, spec->destination_count,
                              spec->rank_count);
        }
    }
    return WSYNC_OK;
}

static wsync_plan_budget_t budget(const char *name, uint64_t asked, uint64_t otherwise)
{
    return (wsync_plan_budget_t){name, asked != 0 ? asked : otherwise, asked != 0};
}

/* Rounds are a quarter of the ring, staging is as large as a round. */
static void set_budgets(wsync_planner_t *planner)
{
    const wsync_plan_spec_t *spec = planner->spec;
    uint64_t otherwise = default_round_nbytes;

    if (spec->ring_nbytes != 0 && spec->ring_nbytes / 4 < otherwise) {
        otherwise = wsync_plan_pad(spec->ring_nbytes / 4 + 1) - WSYNC_PLAN_ALIGN;
        otherwise = otherwise != 0 ? otherwise : WSYNC_PLAN_ALIGN;
    }
    planner->ring = budget("ring_nbytes", spec->ring_nbytes, UINT64_MAX);
    planner->round = budget("round_nbytes", spec->round_nbytes, otherwise);
    planner->round.fixed = planner->round.fixed && !spec->rounds_grow;
    planner->send = budget("send_nbytes", spec->send_nbytes, planner->round.nbytes);
    planner->recv = budget("recv_nbytes", spec->recv_nbytes, planner->round.nbytes);
    if (planner->ring.nbytes < planner->round.nbytes) {
        planner->round.nbytes = planner->ring.nbytes;
    }
}

static wsync_status_t sort_workers(wsync_planner_t *planner)
{
    const wsync_plan_spec_t *spec = planner->spec;
    wsync_plan_worker_t *workers = malloc((spec->worker_count + 1U) * sizeof(*workers));
    const wsync_keyed_t keyed = {workers, spec->worker_count, sizeof(*workers),
                                 offsetof(wsync_plan_worker_t, destination),
                                 spec->destination_count};

    for (uint32_t i = 0; workers != NULL && i < spec->worker_count; i++) {
        workers[i] =
            (wsync_plan_worker_t){spec->workers[i].destination, spec->workers[i].home, i};
    }
    if (workers != NULL) {
        planner->workers = wsync_sort_by_key(&keyed, &planner->first_worker);
    }
    free(workers);
    return planner->workers != NULL ? WSYNC_OK : wsync_no_memory(planner->err, "plan");
}

static wsync_status_t planner_init(wsync_planner_t *planner)
{
    const wsync_plan_spec_t *spec = planner->spec;
    const size_t counter_count = wsync_plan_counter_count(planner);

    set_budgets(planner);
    planner->loads = calloc(spec->rank_count, sizeof(*planner->loads));
    planner->weights = calloc(spec->rank_count, sizeof(*planner->weights));
    planner->touched = calloc(spec->rank_count, sizeof(*planner->touched));
    planner->use.slots = calloc(counter_count, sizeof(*planner->use.slots));
    planner->use.touched = calloc(counter_count, sizeof(*planner->use.touched));
    if (planner->loads == NULL || planner->weights == NULL || planner->touched == NULL ||
        planner->use.slots == NULL || planner->use.touched == NULL) {
        return wsync_no_memory(planner->err, "plan");
    }
    planner->use.sends = planner->use.slots + spec->destination_count;
    planner->use.recvs = planner->use.sends + spec->rank_count;
    return sort_workers(planner);
}

static void planner_fini(wsync_planner_t *planner)
{
    free(planner->refs);
    free(planner->first_ref);
    free(planner->whole);
    free(planner->next);
    free(planner->leader);
    free(planner->first_worker);
    free(planner->workers);
    wsync_idsets_fini(&planner->ranks);
    wsync_idsets_fini(&planner->audiences);
    free(planner->audience_info.items);
    free(planner->classes.items);
    free(planner->groups.items);
    wsync_table_fini(&planner->class_table);
    free(planner->loads);
    free(planner->sources.items);
    free(planner->demands.items);
    free(planner->wants.items);
    free(planner->pieces.items);
    free(planner->sends.items);
    free(planner->items.items);
    free(planner->empties.items);
    free(planner->turns);
    free(planner->first_in_round);
    free(planner->use.slots);
    free(planner->use.touched);
    wsync_cover_fini(&planner->cover);
    free(planner->ids.items);
    free(planner->more_ids.items);
    free(planner->weights);
    free(planner->touched);
    wsync_split_fini(&planner->split);
}

/* Bytes of the boxes that the workers asked for, counted from their layouts. */
static uint64_t count_needed(const wsync_planner_t *planner)
{
    const wsync_plan_spec_t *spec = planner->spec;
    uint64_t total = 0;

    for (size_t i = 0; i < wsync_layout_tensor_count(spec->source); i++) {
        const wsync_tensor_t *source = wsync_layout_tensor(spec->source, i);
        const wsync_box_t whole = wsync_box_whole(source->ndim, source->shape);

        for (size_t j = planner->first_ref[i]; j < planner->first_ref[i + 1]; j++) {
            const wsync_plan_ref_t *ref = &planner->refs[j];
            const wsync_destination_t *wanted = &spec->destinations[ref->destination];
            const size_t workers = planner->first_worker[ref->destination + 1U] -
                                   planner->first_worker[ref->destination];
            const size_t a = wsync_dtype_nbytes(source->dtype);
            const size_t b =
                wsync_dtype_nbytes(wsync_layout_tensor(wanted->layout, ref->tensor)->dtype);
            uint64_t elements = 0;
            size_t count;
            const wsync_shard_t *shards =
                wsync_layout_shards(wanted->layout, ref->tensor, &count);

            if (wanted->whole) {
                elements = wsync_box_count(&whole);
            }
            for (size_t k = 0; k < count && !wanted->whole; k++) {
                elements += wsync_box_count(&shards[k].box);
            }
            total += elements * workers * (a < b ? a : b);
        }
    }
    return total;
}

static wsync_status_t list_unused(const wsync_planner_t *planner, wsync_plan_t *plan)
{
    const wsync_layout_t *source = planner->spec->source;

    for (size_t i = 0; i < wsync_layout_tensor_count(source); i++) {
        const wsync_tensor_t *tensor = wsync_layout_tensor(source, i);
        const wsync_box_t whole = wsync_box_whole(tensor->ndim, tensor->shape);

        if (planner->first_ref[i] == planner->first_ref[i + 1] &&
            wsync_box_count(&whole) > 0) {
            if (!WSYNC_ARRAY_RESERVE(plan->unused, 1)) {
                return wsync_no_memory(planner->err, "plan");
            }
            plan->unused.items[plan->unused.count++] = (uint32_t)i;
        }
    }
    return WSYNC_OK;
}

/* Once copies are emitted nobody asks for pieces, the largest tables there are. */
static void drop_pieces(wsync_planner_t *planner)
{
    free(planner->pieces.items);
    free(planner->sends.items);
    planner->pieces.items = NULL;
    planner->sends.items = NULL;
}

static wsync_status_t fill_plan(wsync_planner_t *planner, wsync_plan_t *plan)
{
    const wsync_plan_spec_t *spec = planner->spec;
    wsync_status_t status;

    plan->rank = spec->rank;
    plan->worker_count = spec->worker_count;
    plan->destination_count = spec->destination_count;
    plan->destinations = malloc((spec->worker_count + 1U) * sizeof(*plan->destinations));
    if (plan->destinations == NULL) {
        return wsync_no_memory(planner->err, "plan");
    }
    for (uint32_t i = 0; i < spec->worker_count; i++) {
        plan->destinations[i] = spec->workers[i].destination;
    }
    status = wsync_plan_make_rings(planner, plan);
    if (status == WSYNC_OK) {
        status = wsync_plan_emit(planner, plan);
    }
    if (status == WSYNC_OK) {
        drop_pieces(planner);
        status = wsync_plan_keep_deliveries(planner, plan);
    }
    if (status == WSYNC_OK) {
        status = list_unused(planner, plan);
    }
    if (status == WSYNC_OK) {
        plan->stats.needed_nbytes = count_needed(planner);
        /* Moved: messages point into the list of ranks. */
        plan->ranks = planner->ranks;
        plan->audiences = planner->audiences;
        planner->ranks = (wsync_idsets_t){0};
        planner->audiences = (wsync_idsets_t){0};
        wsync_split_drop(&planner->split);
        plan->split = planner->split;
        planner->split = (wsync_split_t){0};
    }
    return status;
}

/* Puts layouts without steps into a specification, whose destinations are a copy. */
static wsync_status_t split_spec(wsync_planner_t *planner, wsync_plan_spec_t *spec,
                                 wsync_destination_t *destinations)
{
    const size_t count = spec->destination_count + (size_t)1;
    const wsync_layout_t **given =
        (const wsync_layout_t **)malloc(count * sizeof(given[0]));
    wsync_status_t status;

    if (given == NULL || destinations == NULL) {
        status = wsync_no_memory(planner->err, "plan");
        goto cleanup;
    }
    given[0] = spec->source;
    for (size_t i = 1; i < count; i++) {
        destinations[i - 1] = spec->destinations[i - 1];
        given[i] = destinations[i - 1].layout;
    }
    spec->destinations = destinations;
    status = wsync_split_steps(given, count, &planner->split, planner->err);
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        const wsync_layout_t **layout =
            i == 0 ? &spec->source : &destinations[i - 1].layout;

        *layout = planner->split.layouts[i] != NULL ? planner->split.layouts[i] : given[i];
    }

cleanup:
    free((void *)given);
    return status;
}

wsync_status_t wsync_plan_create(const wsync_plan_spec_t *spec, wsync_plan_t **plan,
                                 wsync_error_t *err)
{
    wsync_plan_spec_t own = *spec;
    wsync_planner_t planner = {.spec = &own, .err = err};
    wsync_destination_t *destinations = NULL;
    wsync_plan_t *made = NULL;
    wsync_status_t status = check_spec(spec, err);

    if (status == WSYNC_OK) {
        destinations = malloc((own.destination_count + 1U) * sizeof(*destinations));
        status = split_spec(&planner, &own, destinations);
    }
    if (status == WSYNC_OK) {
        status = planner_init(&planner);
    }
    if (status == WSYNC_OK) {
        status = wsync_plan_make_items(&planner);
    }
    if (status == WSYNC_OK) {
        status = wsync_plan_make_rounds(&planner);
    }
    if (status != WSYNC_OK) {
        goto cleanup;
    }
    made = calloc(1, sizeof(*made));
    if (made == NULL) {
        status = wsync_no_memory(planner.err, "plan");
        goto cleanup;
    }
    status = fill_plan(&planner, made);
    if (status == WSYNC_OK) {
        *plan = made;
        made = NULL;
    }

cleanup:
    wsync_plan_destroy(made);
    planner_fini(&planner);
    free(destinations);
    return status;
}

void wsync_plan_destroy(wsync_plan_t *plan)
{
    if (plan == NULL) {
        return;
    }
    free(plan->destinations);
    free(plan->slots);
    free(plan->rings);
    for (int i = 0; i < WSYNC_PHASE_COUNT; i++) {
        wsync_copies_fini(&plan->copies[i]);
        free(plan->first_copy[i]);
    }
    free(plan->messages.items);
    free(plan->first_message);
    wsync_idsets_fini(&plan->ranks);
    wsync_idsets_fini(&plan->audiences);
    wsync_split_fini(&plan->split);
    wsync_names_fini(&plan->names);
    free(plan->tensors);
    free(plan->deliveries);
    free(plan->unused.items);
    free(plan);
}

/* --- reading -------------------------------------------------------------------------- */

uint32_t wsync_plan_round_count(const wsync_plan_t *plan)
{
    return plan->round_count;
}

uint64_t wsync_plan_round_nbytes(const wsync_plan_t *plan)
{
    return plan->round_nbytes;
}

uint32_t wsync_plan_worker_count(const wsync_plan_t *plan)
{
    return plan->worker_count;
}

const wsync_copy_t *wsync_plan_copies(const wsync_plan_t *plan, uint32_t round,
                                      wsync_phase_t phase, size_t *count)
{
    const size_t first = plan->first_copy[phase][round];

    *count = plan->first_copy[phase][round + 1] - first;
    return *count != 0 ? plan->copies[phase].items + first : NULL;
}

const wsync_message_t *wsync_plan_messages(const wsync_plan_t *plan, uint32_t round,
                                           size_t *count)
{
    const size_t first = plan->first_message[round];

    *count = plan->first_message[round + 1] - first;
    return *count != 0 ? plan->messages.items + first : NULL;
}

wsync_slot_t wsync_plan_slot(const wsync_plan_t *plan, uint32_t worker, uint32_t round)
{
    return plan->slots[(size_t)plan->destinations[worker] * plan->round_count + round];
}

uint64_t wsync_plan_ring_nbytes(const wsync_plan_t *plan, uint32_t worker)
{
    return plan->rings[plan->destinations[worker]];
}

uint64_t wsync_plan_send_nbytes(const wsync_plan_t *plan)
{
    return plan->send_nbytes;
}

uint64_t wsync_plan_recv_nbytes(const wsync_plan_t *plan)
{
    return plan->recv_nbytes;
}

wsync_plan_stats_t wsync_plan_stats(const wsync_plan_t *plan)
{
    return plan->stats;
}

const uint32_t *wsync_plan_unused(const wsync_plan_t *plan, size_t *count)
{
    *count = plan->unused.count;
    return plan->unused.items;
}

uint64_t wsync_plan_fingerprint(const wsync_plan_t *plan)
{
    return plan->fingerprint;
}
