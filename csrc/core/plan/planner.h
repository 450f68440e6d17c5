/* SPDX-License-Identifier: Apache-2.0
 * What the files of the planner share; others use plan.h.
 *
 *   items.c     tensors -> items: what is never cut, and what is cut to fit
 *   match_boxes.c     one tensor: which source boxes serve which wanted boxes
 *   senders.c   one piece: which replica serves which workers
 *   rounds.c    items -> rounds
 *   slots.c     rounds -> slots of the rings
 *   copies.c    rounds -> messages, and this rank's copies: pack, local and unpack
 *   manifest.c  what is delivered, and the layout of a worker's ring
 *   plan.c      the entry point and the accessors
 *
 * Everything but the emitted copies is decided from what all ranks know, so that all ranks
 * decide the same. */
#ifndef WSYNC_CORE_PLAN_PLANNER_H
#define WSYNC_CORE_PLAN_PLANNER_H

#include "core/base/array.h"
#include "core/base/idsets.h"
#include "core/base/names.h"
#include "core/base/table.h"
#include "core/box_cover.h"
#include "core/layout/split_steps.h"
#include "core/plan/plan.h"

enum { WSYNC_PLAN_ALIGN = 64 };
#define WSYNC_PLAN_NONE UINT32_MAX

static inline uint64_t wsync_plan_pad(uint64_t nbytes)
{
    return (nbytes + WSYNC_PLAN_ALIGN - 1) / WSYNC_PLAN_ALIGN * WSYNC_PLAN_ALIGN;
}

/* In what order the dimensions of a box lie in memory that the plan lays out, outermost
 * first. */
typedef struct wsync_plan_order {
    uint8_t dims[WSYNC_MAX_NDIM];
} wsync_plan_order_t;

/* A box whose bytes every destination of the audience wants, in one dtype. */
typedef struct wsync_plan_want {
    wsync_box_t box;
    uint64_t nbytes; /* as delivered */
    size_t first_piece;
    uint32_t piece_count;
    uint32_t tensor;   /* of the source layout */
    uint32_t audience; /* set of destinations */
    wsync_dtype_t dtype;
    wsync_plan_order_t order;
} wsync_plan_want_t;

/* The part of a want that one source box serves. */
typedef struct wsync_plan_piece {
    wsync_box_t box;
    uint64_t nbytes;
    size_t first_send;
    uint32_t send_count;
    uint32_t class;
    uint32_t shard; /* this rank's shard of the tensor, or WSYNC_PLAN_NONE */
} wsync_plan_piece_t;

/* One source serving one set of peers with a piece. */
typedef struct wsync_plan_send {
    uint32_t source;
    uint32_t peers;   /* set of ranks */
    uint32_t message; /* while a round is emitted: its number in order of appearance */
    uint64_t offset;  /* while a round is emitted: bytes from the message's start */
} wsync_plan_send_t;

/* What is scheduled as a whole: adjacent wants. */
typedef struct wsync_plan_item {
    size_t first_want;
    uint32_t want_count;
    uint32_t owner;  /* the rank that serves most of its bytes */
    uint64_t nbytes; /* with padding */
} wsync_plan_item_t;

/* An item and the round that it was put into. */
typedef struct wsync_plan_turn {
    size_t item;
    uint32_t round;
} wsync_plan_turn_t;

/* Who is behind a set of destinations. */
typedef struct wsync_plan_audience {
    uint32_t homes; /* set of ranks */
    uint32_t worker_count;
} wsync_plan_audience_t;

/* What is common to all pieces with one audience and one set of holders. */
typedef struct wsync_plan_class {
    uint32_t audience;
    uint32_t holders; /* set of ranks */
    uint32_t locals;  /* set of ranks that hold the piece and want it */
    uint32_t group_count;
    size_t first_group;
    bool has_rest; /* the last group is served from any host */
} wsync_plan_class_t;

/* Homes of one class that choose among the same candidates. */
typedef struct wsync_plan_group {
    uint32_t peers;      /* set of ranks */
    uint32_t candidates; /* set of ranks */
    uint32_t with_rest;  /* set of ranks: also the rest's peers; lazily made */
} wsync_plan_group_t;

typedef struct wsync_plan_budget {
    const char *name;
    uint64_t nbytes; /* what rounds are filled to */
    bool fixed;      /* asked for; otherwise an item that cannot be cut may exceed it */
} wsync_plan_budget_t;

/* Bytes with padding by counter: first the slots of all destinations, then the send staging
 * of all ranks, then their receive staging. */
typedef struct wsync_plan_use {
    uint64_t *slots; /* all counters start here */
    uint64_t *sends;
    uint64_t *recvs;
    uint32_t *touched; /* counters that are not zero */
    size_t touched_count;
} wsync_plan_use_t;

/* A distinct box of the tensor at hand in the source layout. */
typedef struct wsync_plan_source {
    wsync_box_t box;
    uint32_t holders;
    uint32_t shard; /* this rank's, or WSYNC_PLAN_NONE */
    uint32_t origin;
} wsync_plan_source_t;

/* A distinct box of the tensor at hand that is wanted. */
typedef struct wsync_plan_demand {
    wsync_box_t box;
    uint32_t audience;
    wsync_dtype_t dtype;
    wsync_plan_order_t order;
} wsync_plan_demand_t;

/* One destination's interest in a source tensor. */
typedef struct wsync_plan_ref {
    uint32_t source; /* tensor of the source layout */
    uint32_t destination;
    uint32_t tensor; /* of the destination's layout */
} wsync_plan_ref_t;

/* A worker of the specification, and its number there. */
typedef struct wsync_plan_worker {
    uint32_t destination;
    uint32_t home;
    uint32_t number;
} wsync_plan_worker_t;

typedef WSYNC_ARRAY(uint32_t) wsync_plan_ids_t;

typedef struct wsync_planner {
    const wsync_plan_spec_t *spec; /* without steps */
    wsync_split_t split;
    wsync_plan_budget_t round;
    wsync_plan_budget_t send;
    wsync_plan_budget_t recv;
    wsync_plan_budget_t ring;
    /* the interest of all destinations, by source tensor */
    wsync_plan_ref_t *refs;
    size_t *first_ref; /* tensor count + 1 */
    bool *whole;       /* of every source tensor: somebody wants it in one piece */
    uint32_t *next;    /* of every source tensor: the next one of its keep-together group */
    uint32_t *leader;  /* of every source tensor: the first one of its group */
    /* workers by destination */
    size_t *first_worker; /* destination count + 1 */
    wsync_plan_worker_t *workers;
    /* interned lists */
    wsync_idsets_t ranks;
    wsync_idsets_t audiences; /* sets of destinations */
    WSYNC_ARRAY(wsync_plan_audience_t) audience_info;
    WSYNC_ARRAY(wsync_plan_class_t) classes;
    WSYNC_ARRAY(wsync_plan_group_t) groups;
    wsync_table_t class_table; /* by audience and holders */
    uint64_t *loads;           /* of every rank: bytes it was chosen to send, once a peer */
    /* the tensor at hand */
    WSYNC_ARRAY(wsync_plan_source_t) sources;
    WSYNC_ARRAY(wsync_plan_demand_t) demands;
    bool sources_overlap;
    /* decisions */
    WSYNC_ARRAY(wsync_plan_want_t) wants;
    WSYNC_ARRAY(wsync_plan_piece_t) pieces;
    WSYNC_ARRAY(wsync_plan_send_t) sends;
    WSYNC_ARRAY(wsync_plan_item_t) items;
    WSYNC_ARRAY(wsync_plan_want_t) empties; /* zero-size tensors: in no item */
    wsync_plan_turn_t *turns;               /* of all items, by round */
    size_t *first_in_round;                 /* in turns; round_count + 1 */
    uint32_t round_count;
    wsync_plan_use_t use; /* of the item at hand */
    /* scratch */
    wsync_cover_t cover;
    wsync_plan_ids_t ids;
    wsync_plan_ids_t more_ids;
    uint64_t *weights; /* of every rank; zero between uses */
    uint32_t *touched; /* ranks whose weight is not zero */
    uint32_t touched_count;
    wsync_error_t *err;
} wsync_planner_t;

/* The number of the first worker that takes this destination.  Messages name it. */
static inline uint32_t wsync_planner_first_worker(const wsync_planner_t *planner,
                                                  uint32_t destination)
{
    return planner->workers[planner->first_worker[destination]].number;
}

/* Collects what destinations want, decides keep-together groups, makes all items. */
wsync_status_t wsync_plan_make_items(wsync_planner_t *planner);

/* Fills planner->sources and ->demands with the distinct boxes of a source tensor. */
wsync_status_t wsync_plan_load_tensor(wsync_planner_t *planner, uint32_t tensor);
/* Appends a want and its pieces for a box of the loaded tensor. */
wsync_status_t wsync_plan_add_want(wsync_planner_t *planner, uint32_t tensor,
                                   const wsync_plan_demand_t *demand);

/* Interns a set of destinations (ascending) as an audience. */
wsync_status_t wsync_plan_audience(wsync_planner_t *planner, const uint32_t *ids,
                                   size_t count, uint32_t *audience);
/* Appends the sends that serve a piece's class and counts their load. */
wsync_status_t wsync_plan_choose(wsync_planner_t *planner, uint32_t audience,
                                 uint32_t holders, wsync_plan_piece_t *piece);

/* Number of counters of a use, and how much one may hold. */
size_t wsync_plan_counter_count(const wsync_planner_t *planner);
uint64_t wsync_plan_limit(const wsync_planner_t *planner, size_t counter);

/* Sets planner->use to what an item needs, or to nothing. */
void wsync_plan_use_set(wsync_planner_t *planner, const wsync_plan_item_t *item);
void wsync_plan_use_clear(wsync_planner_t *planner);

/* Strides of a box that lies without gaps, in bytes. */
void wsync_plan_strides(const wsync_box_t *box, wsync_plan_order_t order,
                        wsync_dtype_t dtype, int64_t stride[WSYNC_MAX_NDIM]);

/* Decides planner->turns and ->first_in_round. */
wsync_status_t wsync_plan_make_rounds(wsync_planner_t *planner);
/* Decides the slots (destination-major) and ring sizes of all destinations. */
wsync_status_t wsync_plan_make_rings(wsync_planner_t *planner, wsync_plan_t *plan);
/* Fills the plan's tensors and deliveries, for manifests. */
wsync_status_t wsync_plan_keep_deliveries(const wsync_planner_t *planner,
                                          wsync_plan_t *plan);
/* Fills the plan's messages, copies, staging sizes, statistics and fingerprint. */
wsync_status_t wsync_plan_emit(wsync_planner_t *planner, wsync_plan_t *plan);

/* What a delivered tensor is, and what lies in a worker's slots. */
typedef struct wsync_plan_delivery {
    wsync_box_t box;
    uint64_t nbytes;
    uint32_t tensor; /* of plan->tensors */
    uint32_t audience;
    uint32_t round;
    wsync_dtype_t dtype;
    wsync_plan_order_t order;
} wsync_plan_delivery_t;

struct wsync_plan {
    uint32_t rank;
    uint32_t round_count;
    uint32_t worker_count;
    uint32_t destination_count;
    uint64_t round_nbytes;
    uint32_t *destinations; /* of every worker */
    wsync_slot_t *slots;    /* destination * round_count + round */
    uint64_t *rings;        /* of every destination */
    wsync_copies_t copies[WSYNC_PHASE_COUNT];
    size_t *first_copy[WSYNC_PHASE_COUNT]; /* round_count + 1 */
    WSYNC_ARRAY(wsync_message_t) messages;
    size_t *first_message; /* round_count + 1 */
    wsync_idsets_t ranks;  /* peers of messages */
    uint64_t send_nbytes;
    uint64_t recv_nbytes;
    /* for manifests */
    wsync_idsets_t audiences;
    wsync_split_t split;
    wsync_names_t names; /* index = tensor */
    wsync_tensor_t *tensors;
    wsync_plan_delivery_t *deliveries; /* in the order of rounds */
    size_t delivery_count;
    WSYNC_ARRAY(uint32_t) unused; /* tensors that no worker reads */
    wsync_plan_stats_t stats;
    uint64_t fingerprint;
};

#endif
