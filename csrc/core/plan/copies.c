/* SPDX-License-Identifier: Apache-2.0
 * Rounds -> messages of all ranks, and from them what this rank does. */
#include <stdlib.h>
#include <string.h>

#include "core/base/counting_sort.h"
#include "core/base/divide.h"
#include "core/plan/planner.h"

/* Where messages begin if there is room: NCCL and GPUs move whole lines of so many bytes.
 */
enum { MESSAGE_ALIGN = 128 };

/* A message of the round at hand. */
typedef struct message {
    uint32_t source;
    uint32_t peers; /* set of ranks */
    uint32_t index; /* among this rank's messages, or WSYNC_PLAN_NONE */
    uint64_t nbytes;
} message_t;

typedef struct message_key {
    uint32_t source;
    uint32_t peers;
    uint32_t number; /* in the order of appearance */
} message_key_t;

typedef struct emitter {
    wsync_planner_t *planner;
    wsync_plan_t *plan;
    uint32_t round;
    WSYNC_ARRAY(message_t) messages;  /* in the order of appearance */
    WSYNC_ARRAY(message_key_t) order; /* by source, then peers */
    wsync_table_t table;              /* of messages, by source and peers */
    uint64_t *fills;                  /* of every destination: bytes used of its slot */
    size_t *first_mine;               /* destination count + 1 */
    uint32_t *mine;                   /* workers whose home is here, by destination */
} emitter_t;

/* --- fingerprint ---------------------------------------------------------------------- */

static void mix(wsync_plan_t *plan, uint64_t value)
{
    const uint64_t hash = (plan->fingerprint ^ value) * 0xff51afd7ed558ccdU;

    plan->fingerprint = hash ^ hash >> 29;
}

static void mix_box(wsync_plan_t *plan, const wsync_box_t *box)
{
    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        mix(plan, (uint64_t)box->start[i]);
        mix(plan, (uint64_t)box->extent[i]);
    }
}

static void mix_sets(wsync_plan_t *plan, const wsync_idsets_t *sets)
{
    for (size_t i = 0; i < sets->count; i++) {
        mix(plan, sets->items[i].count);
    }
    for (size_t i = 0; i < sets->ids.count; i++) {
        mix(plan, sets->ids.items[i]);
    }
}

/* What rounds refer to by number. */
static void mix_tables(const wsync_planner_t *planner, wsync_plan_t *plan)
{
    const wsync_plan_spec_t *spec = planner->spec;

    plan->fingerprint = 0x9e3779b97f4a7c15U;
    mix_sets(plan, &planner->ranks);
    mix_sets(plan, &planner->audiences);
    for (uint32_t i = 0; i < spec->worker_count; i++) {
        mix(plan, (uint64_t)spec->workers[i].destination << 32 | spec->workers[i].home);
    }
    for (size_t i = 0; i < spec->destination_count; i++) {
        mix(plan, plan->rings[i]);
        for (size_t j = 0; j < plan->round_count; j++) {
            mix(plan, plan->slots[i * plan->round_count + j].offset);
            mix(plan, plan->slots[i * plan->round_count + j].nbytes);
        }
    }
    for (size_t i = 0; i < wsync_layout_tensor_count(spec->source); i++) {
        const wsync_tensor_t *tensor = wsync_layout_tensor(spec->source, i);

        if (planner->first_ref[i] == planner->first_ref[i + 1]) {
            continue;
        }
        mix(plan, (uint64_t)tensor->dtype);
        for (unsigned j = 0; j < WSYNC_MAX_NDIM; j++) {
            mix(plan, (uint64_t)tensor->shape[j]);
        }
        for (const char *c = tensor->name; *c != '\0'; c++) {
            mix(plan, (uint8_t)*c);
        }
    }
}

/* --- messages ------------------------------------------------------------------------- */

/* Puts a piece into the message of its source and peers. */
static wsync_status_t add_to_message(emitter_t *emitter, wsync_plan_send_t *send,
                                     uint64_t nbytes)
{
    const uint64_t key = (uint64_t)send->source << 32 | send->peers;
    message_t *message;

    send->message = wsync_table_find(&emitter->table, key);
    if (send->message == WSYNC_TABLE_NONE) {
        if (!WSYNC_ARRAY_RESERVE(emitter->messages, 1) ||
            !wsync_table_add(&emitter->table, key)) {
            return wsync_no_memory(emitter->planner->err, "plan");
        }
        send->message = (uint32_t)emitter->messages.count;
        emitter->messages.items[emitter->messages.count++] =
            (message_t){send->source, send->peers, WSYNC_PLAN_NONE, 0};
    }
    message = &emitter->messages.items[send->message];
    send->offset = wsync_plan_pad(message->nbytes);
    message->nbytes = send->offset + nbytes;
    return WSYNC_OK;
}

static int compare_keys(const void *left, const void *right)
{
    const message_key_t *a = left;
    const message_key_t *b = right;
    const int sources = WSYNC_COMPARE(a->source, b->source);

    return sources != 0 ? sources : WSYNC_COMPARE(a->peers, b->peers);
}

/* Where messages of a rank's staging begin: at multiples of this.  They are those of one
 * source, from `first` on in their order, or, from 0 on, those that this rank receives.
 * Rounds are filled as if messages began at multiples of WSYNC_PLAN_ALIGN: with more
 * between them they may exceed the budget, which is forbidden where one was asked for. */
static uint64_t choose_alignment(const emitter_t *emitter, size_t first, bool received,
                                 const wsync_plan_budget_t *budget)
{
    const message_key_t *order = emitter->order.items;
    uint64_t end = 0;

    if (!budget->fixed) {
        return MESSAGE_ALIGN;
    }
    for (size_t i = first; i < emitter->messages.count; i++) {
        if (!received && order[i].source != order[first].source) {
            break;
        }
        if (!received || wsync_idsets_contains(&emitter->planner->ranks, order[i].peers,
                                               emitter->plan->rank)) {
            end = wsync_round_up(end, MESSAGE_ALIGN) +
                  emitter->messages.items[order[i].number].nbytes;
        }
    }
    return end <= budget->nbytes ? MESSAGE_ALIGN : WSYNC_PLAN_ALIGN;
}

static wsync_status_t sort_messages(emitter_t *emitter)
{
    const size_t count = emitter->messages.count;

    emitter->order.count = 0;
    if (!WSYNC_ARRAY_RESERVE(emitter->order, count + 1) ||
        !WSYNC_ARRAY_RESERVE(emitter->plan->messages, count + 1)) {
        return wsync_no_memory(emitter->planner->err, "plan");
    }
    for (uint32_t i = 0; i < count; i++) {
        const message_t *message = &emitter->messages.items[i];

        emitter->order.items[i] = (message_key_t){message->source, message->peers, i};
    }
    qsort(emitter->order.items, count, sizeof(message_key_t), compare_keys);
    return WSYNC_OK;
}

/* Lays the round's messages out in everybody's staging and keeps this rank's. */
static void place_messages(emitter_t *emitter)
{
    const wsync_planner_t *planner = emitter->planner;
    wsync_plan_t *plan = emitter->plan;
    const uint64_t recv_align = choose_alignment(emitter, 0, true, &planner->recv);
    uint64_t send_align = 0;
    uint64_t send_end = 0;
    uint64_t recv_end = 0;
    uint32_t index = 0;

    for (size_t i = 0; i < emitter->messages.count; i++) {
        const message_key_t *key = &emitter->order.items[i];
        message_t *message = &emitter->messages.items[key->number];
        const bool sent = key->source == plan->rank;
        wsync_message_t made = {.source = key->source, .nbytes = message->nbytes};
        size_t peer_count;

        if (i == 0 || emitter->order.items[i - 1].source != key->source) {
            send_align = choose_alignment(emitter, i, false, &planner->send);
            send_end = 0;
        }
        made.peers = wsync_idsets_get(&planner->ranks, key->peers, &peer_count);
        made.peer_count = (uint32_t)peer_count;
        made.send_offset = wsync_round_up(send_end, send_align);
        send_end = made.send_offset + message->nbytes;
        plan->stats.message_count++;
        plan->stats.sent_nbytes += message->nbytes * peer_count;
        mix(plan, (uint64_t)key->source << 32 | key->peers);
        mix(plan, message->nbytes);
        if (sent) {
            plan->send_nbytes = send_end > plan->send_nbytes ? send_end : plan->send_nbytes;
        } else if (wsync_idsets_contains(&planner->ranks, key->peers, plan->rank)) {
            made.recv_offset = wsync_round_up(recv_end, recv_align);
            recv_end = made.recv_offset + message->nbytes;
        } else {
            continue;
        }
        message->index = index++;
        plan->messages.items[plan->messages.count++] = made;
    }
    plan->recv_nbytes = recv_end > plan->recv_nbytes ? recv_end : plan->recv_nbytes;
}

/* --- copies --------------------------------------------------------------------------- */

void wsync_plan_strides(const wsync_box_t *box, wsync_plan_order_t order,
                        wsync_dtype_t dtype, int64_t stride[WSYNC_MAX_NDIM])
{
    int64_t step = (int64_t)wsync_dtype_nbytes(dtype);

    for (unsigned i = WSYNC_MAX_NDIM; i-- > 0;) {
        stride[order.dims[i]] = step;
        step *= box->extent[order.dims[i]];
    }
}

/* A part of a box of a want that lies without gaps at `offset`. */
static wsync_place_t place_in(const wsync_plan_want_t *want, const wsync_box_t *box,
                              uint64_t offset, uint32_t buffer, const wsync_box_t *part)
{
    wsync_place_t place = {.buffer = buffer, .dtype = want->dtype, .offset = offset};

    wsync_plan_strides(box, want->order, want->dtype, place.stride);
    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        place.offset += (uint64_t)((part->start[i] - box->start[i]) * place.stride[i]);
    }
    return place;
}

/* Copies a piece into the slots of all workers here that want it. */
static wsync_status_t copy_to_slots(emitter_t *emitter, wsync_phase_t phase,
                                    const wsync_plan_want_t *want,
                                    const wsync_plan_piece_t *piece,
                                    const wsync_place_t *source)
{
    const wsync_plan_t *plan = emitter->plan;
    size_t count;
    const uint32_t *ids =
        wsync_idsets_get(&emitter->planner->audiences, want->audience, &count);
    wsync_status_t status = WSYNC_OK;

    for (size_t i = 0; i < count; i++) {
        const wsync_slot_t *slot =
            &plan->slots[(size_t)ids[i] * plan->round_count + emitter->round];

        for (size_t j = emitter->first_mine[ids[i]];
             j < emitter->first_mine[ids[i] + 1] && status == WSYNC_OK; j++) {
            const wsync_place_t place =
                place_in(want, &want->box, slot->offset + emitter->fills[ids[i]],
                         emitter->mine[j], &piece->box);

            status = wsync_copies_append(&emitter->plan->copies[phase], piece->box.extent,
                                         source, &place, emitter->planner->err);
        }
    }
    return status;
}

static wsync_status_t emit_piece(emitter_t *emitter, const wsync_plan_want_t *want,
                                 const wsync_plan_piece_t *piece)
{
    wsync_planner_t *planner = emitter->planner;
    const wsync_layout_t *layout = planner->spec->source;
    wsync_place_t shard = {0};
    size_t count;
    wsync_status_t status = WSYNC_OK;

    if (piece->shard != WSYNC_PLAN_NONE) {
        shard = wsync_layout_place(
            layout, wsync_layout_shards(layout, want->tensor, &count) + piece->shard,
            &piece->box);
        status = copy_to_slots(emitter, WSYNC_PHASE_LOCAL, want, piece, &shard);
    }
    for (size_t i = 0; i < piece->send_count && status == WSYNC_OK; i++) {
        const wsync_plan_send_t *send = &planner->sends.items[piece->first_send + i];
        const uint32_t index = emitter->messages.items[send->message].index;
        wsync_place_t place;

        if (index == WSYNC_PLAN_NONE) {
            continue;
        }
        place = place_in(want, &piece->box, send->offset, index, &piece->box);
        if (send->source == emitter->plan->rank) {
            status = wsync_copies_append(&emitter->plan->copies[WSYNC_PHASE_PACK],
                                         piece->box.extent, &shard, &place, planner->err);
        } else {
            status = copy_to_slots(emitter, WSYNC_PHASE_UNPACK, want, piece, &place);
        }
    }
    return status;
}

static wsync_status_t emit_want(emitter_t *emitter, const wsync_plan_want_t *want)
{
    const wsync_planner_t *planner = emitter->planner;
    wsync_plan_t *plan = emitter->plan;
    size_t count;
    const uint32_t *ids = wsync_idsets_get(&planner->audiences, want->audience, &count);
    wsync_status_t status = WSYNC_OK;

    mix(plan, (uint64_t)want->tensor << 32 | want->audience);
    mix(plan, (uint64_t)want->dtype);
    mix_box(plan, &want->box);
    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        mix(plan, want->order.dims[i]);
    }
    for (size_t i = 0; i < want->piece_count && status == WSYNC_OK; i++) {
        const wsync_plan_piece_t *piece = &planner->pieces.items[want->first_piece + i];

        mix(plan, planner->classes.items[piece->class].holders);
        mix_box(plan, &piece->box);
        plan->stats.delivered_nbytes +=
            piece->nbytes * planner->audience_info.items[want->audience].worker_count;
        status = emit_piece(emitter, want, piece);
    }
    for (size_t i = 0; i < count; i++) {
        emitter->fills[ids[i]] += wsync_plan_pad(want->nbytes);
    }
    return status;
}

/* --- rounds --------------------------------------------------------------------------- */

static wsync_status_t collect_messages(emitter_t *emitter, const wsync_plan_item_t *item)
{
    wsync_planner_t *planner = emitter->planner;
    const wsync_plan_want_t *first = &planner->wants.items[item->first_want];
    const wsync_plan_want_t *last = first + item->want_count - 1;
    wsync_status_t status = WSYNC_OK;

    for (size_t i = first->first_piece;
         i < last->first_piece + last->piece_count && status == WSYNC_OK; i++) {
        const wsync_plan_piece_t *piece = &planner->pieces.items[i];

        for (size_t j = 0; j < piece->send_count && status == WSYNC_OK; j++) {
            wsync_plan_send_t *send = &planner->sends.items[piece->first_send + j];

            status = add_to_message(emitter, send, piece->nbytes);
            mix(emitter->plan, (uint64_t)send->message << 32 ^ send->offset);
        }
    }
    return status;
}

static wsync_status_t emit_round(emitter_t *emitter)
{
    wsync_planner_t *planner = emitter->planner;
    wsync_plan_t *plan = emitter->plan;
    const size_t first = planner->first_in_round[emitter->round];
    const size_t end = planner->first_in_round[emitter->round + 1];
    wsync_status_t status = WSYNC_OK;

    for (int i = 0; i < WSYNC_PHASE_COUNT; i++) {
        plan->first_copy[i][emitter->round] = plan->copies[i].count;
    }
    plan->first_message[emitter->round] = plan->messages.count;
    memset(emitter->fills, 0, planner->spec->destination_count * sizeof(*emitter->fills));
    emitter->messages.count = 0;
    wsync_table_clear(&emitter->table);
    for (size_t i = first; i < end && status == WSYNC_OK; i++) {
        status = collect_messages(emitter, &planner->items.items[planner->turns[i].item]);
    }
    if (status == WSYNC_OK) {
        status = sort_messages(emitter);
    }
    if (status == WSYNC_OK) {
        place_messages(emitter);
    }
    for (size_t i = first; i < end && status == WSYNC_OK; i++) {
        const wsync_plan_item_t *item = &planner->items.items[planner->turns[i].item];

        for (size_t j = 0; j < item->want_count && status == WSYNC_OK; j++) {
            status = emit_want(emitter, &planner->wants.items[item->first_want + j]);
        }
    }
    return status;
}

static wsync_status_t emitter_init(emitter_t *emitter)
{
    const wsync_planner_t *planner = emitter->planner;
    const wsync_plan_spec_t *spec = planner->spec;
    wsync_plan_t *plan = emitter->plan;
    size_t used = 0;

    emitter->fills = malloc((spec->destination_count + 1U) * sizeof(*emitter->fills));
    emitter->first_mine =
        malloc((spec->destination_count + 1U) * sizeof(*emitter->first_mine));
    emitter->mine = malloc((spec->worker_count + 1U) * sizeof(*emitter->mine));
    plan->first_message =
        calloc((size_t)plan->round_count + 1, sizeof(*plan->first_message));
    for (int i = 0; i < WSYNC_PHASE_COUNT; i++) {
        plan->first_copy[i] =
            calloc((size_t)plan->round_count + 1, sizeof(*plan->first_copy[i]));
        if (plan->first_copy[i] == NULL) {
            return wsync_no_memory(planner->err, "plan");
        }
    }
    if (emitter->fills == NULL || emitter->first_mine == NULL || emitter->mine == NULL ||
        plan->first_message == NULL) {
        return wsync_no_memory(planner->err, "plan");
    }
    for (uint32_t i = 0; i < spec->destination_count; i++) {
        emitter->first_mine[i] = used;
        for (size_t j = planner->first_worker[i]; j < planner->first_worker[i + 1]; j++) {
            if (planner->workers[j].home == spec->rank) {
                emitter->mine[used++] = planner->workers[j].number;
            }
        }
    }
    emitter->first_mine[spec->destination_count] = used;
    return WSYNC_OK;
}

wsync_status_t wsync_plan_emit(wsync_planner_t *planner, wsync_plan_t *plan)
{
    emitter_t emitter = {.planner = planner, .plan = plan};
    wsync_status_t status = emitter_init(&emitter);

    if (status == WSYNC_OK) {
        mix_tables(planner, plan);
    }
    for (; emitter.round < plan->round_count && status == WSYNC_OK; emitter.round++) {
        status = emit_round(&emitter);
    }
    if (status == WSYNC_OK) {
        for (int i = 0; i < WSYNC_PHASE_COUNT; i++) {
            plan->first_copy[i][plan->round_count] = plan->copies[i].count;
        }
        plan->first_message[plan->round_count] = plan->messages.count;
    }
    free(emitter.messages.items);
    free(emitter.order.items);
    wsync_table_fini(&emitter.table);
    free(emitter.fills);
    free(emitter.first_mine);
    free(emitter.mine);
    return status;
}
