/* SPDX-License-Identifier: Apache-2.0
 * What a plan keeps about the boxes that it delivers, and the manifests made from it. */
#include <stdlib.h>

#include "core/plan/planner.h"

/* --- what the plan keeps -------------------------------------------------------------- */

/* The plan's own description of a source tensor; group numbers are the first taker's. */
static wsync_status_t keep_tensor(const wsync_planner_t *planner, wsync_plan_t *plan,
                                  uint32_t source, uint32_t *numbers)
{
    const wsync_plan_ref_t *ref = &planner->refs[planner->first_ref[source]];
    const wsync_tensor_t *tensor = wsync_layout_tensor(planner->spec->source, source);
    uint32_t index;
    bool added;
    wsync_status_t status;

    if (numbers[source] != WSYNC_PLAN_NONE) {
        return WSYNC_OK;
    }
    status = wsync_names_add(&plan->names, tensor->name, &index, &added, planner->err);
    if (status == WSYNC_OK) {
        plan->tensors[index] = *tensor;
        plan->tensors[index].name = plan->names.items[index];
        plan->tensors[index].group =
            wsync_layout_tensor(planner->spec->destinations[ref->destination].layout,
                                ref->tensor)
                ->group;
        numbers[source] = index;
    }
    return status;
}

static wsync_status_t keep_want(const wsync_planner_t *planner, wsync_plan_t *plan,
                                const wsync_plan_want_t *want, uint32_t round,
                                uint32_t *numbers)
{
    const wsync_status_t status = keep_tensor(planner, plan, want->tensor, numbers);

    if (status == WSYNC_OK) {
        plan->deliveries[plan->delivery_count++] =
            (wsync_plan_delivery_t){.box = want->box,
                                    .nbytes = want->nbytes,
                                    .tensor = numbers[want->tensor],
                                    .audience = want->audience,
                                    .round = round,
                                    .dtype = want->dtype,
                                    .order = want->order};
    }
    return status;
}

wsync_status_t wsync_plan_keep_deliveries(const wsync_planner_t *planner,
                                          wsync_plan_t *plan)
{
    const size_t count = wsync_layout_tensor_count(planner->spec->source);
    const size_t room = planner->wants.count + planner->empties.count + 1;
    uint32_t *numbers = malloc((count + 1) * sizeof(*numbers));
    wsync_status_t status = WSYNC_OK;

    plan->tensors = malloc((count + 1) * sizeof(*plan->tensors));
    plan->deliveries = malloc(room * sizeof(*plan->deliveries));
    if (numbers == NULL || plan->tensors == NULL || plan->deliveries == NULL) {
        status = wsync_no_memory(planner->err, "plan");
        goto cleanup;
    }
    for (size_t i = 0; i < count; i++) {
        numbers[i] = WSYNC_PLAN_NONE;
    }
    for (uint32_t round = 0; round < plan->round_count; round++) {
        for (size_t i = planner->first_in_round[round];
             i < planner->first_in_round[round + 1]; i++) {
            const wsync_plan_item_t *item = &planner->items.items[planner->turns[i].item];

            for (size_t j = 0; j < item->want_count && status == WSYNC_OK; j++) {
                status =
                    keep_want(planner, plan, &planner->wants.items[item->first_want + j],
                              round, numbers);
            }
        }
    }
    for (size_t i = 0; i < planner->empties.count && status == WSYNC_OK; i++) {
        status = keep_want(planner, plan, &planner->empties.items[i], 0, numbers);
    }

cleanup:
    free(numbers);
    return status;
}

/* --- manifests ------------------------------------------------------------------------ */

static wsync_status_t add_delivery(const wsync_plan_t *plan,
                                   const wsync_plan_delivery_t *delivery, uint64_t offset,
                                   uint32_t origin, wsync_layout_builder_t *builder,
                                   wsync_error_t *err)
{
    wsync_tensor_t tensor = plan->tensors[delivery->tensor];
    wsync_shard_t shard = {.buffer = delivery->round,
                           .origin = origin,
                           .offset = offset,
                           .box = delivery->box};

    tensor.dtype = delivery->dtype;
    wsync_plan_strides(&delivery->box, delivery->order, delivery->dtype, shard.stride);
    return wsync_split_restore(&plan->split, &tensor, delivery->nbytes != 0 ? &shard : NULL,
                               builder, err);
}

wsync_status_t wsync_plan_manifest(const wsync_plan_t *plan, uint32_t worker,
                                   wsync_layout_t **manifest, wsync_error_t *err)
{
    const uint32_t destination = plan->destinations[worker];
    const wsync_slot_t *slots = plan->slots + (size_t)destination * plan->round_count;
    wsync_layout_builder_t *builder = NULL;
    uint64_t fill = 0;
    uint32_t round = 0;
    uint32_t origin = 0;
    wsync_status_t status = wsync_layout_builder_create(&builder, err);

    if (status == WSYNC_OK) {
        status = wsync_layout_builder_origin(builder, "", &origin, err);
    }
    for (size_t i = 0; i < plan->delivery_count && status == WSYNC_OK; i++) {
        const wsync_plan_delivery_t *delivery = &plan->deliveries[i];
        uint64_t offset = 0;

        if (!wsync_idsets_contains(&plan->audiences, delivery->audience, destination)) {
            continue;
        }
        if (delivery->nbytes != 0) {
            fill = delivery->round == round ? fill : 0;
            round = delivery->round;
            offset = slots[round].offset + fill;
            fill += wsync_plan_pad(delivery->nbytes);
        }
        status = add_delivery(plan, delivery, offset, origin, builder, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_finish(builder, manifest, err);
    }
    wsync_layout_builder_destroy(builder);
    return status;
}
