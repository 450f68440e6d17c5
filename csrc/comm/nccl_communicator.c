/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/nccl_communicator.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "core/base/array.h"
#include "device/cuda.h"
#include "device/deadline.h"

enum {
    QUEUE = WSYNC_NCCL_MAX_GROUPS,
    LOOK_MS = 10, /* how often a group that moves is looked after */
    IDLE_MS = 1000,
    ASKS = 3, /* how often NCCL is asked at once whether it is done */
    PAUSE_NS = 20 * 1000,
    SLACK_NS = 1000, /* by which pauses may be longer */
    MAX_PAUSE_NS = 1000 * 1000,
    CLOSE_MS = 30 * 1000, /* how long NCCL may take to abort */
    /* What NCCL may take of the GPU, beside which an engine or a backward pass may run. */
    MAX_CTAS = 16,
    WHAT_NBYTES = 64,
};

struct wsync_nccl_communicator {
    const wsync_nccl_library_t *library;
    const wsync_device_t *device;
    wsync_stream_t *stream;
    wsync_nccl_id_t id;
    uint32_t rank;
    uint32_t rank_count;
    int timeout_ms;
    pid_t pid; /* of the process that has the thread */
    pthread_t thread;

    /* of the thread alone */
    wsync_nccl_comm_t comm;
    uint64_t watched; /* the group that it looks after */
    int64_t begun_ms; /* when that could begin; 0: not yet */

    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t changed;
    wsync_nccl_group_t groups[QUEUE]; /* of which the thread reads the oldest without it */
    wsync_nccl_transfer_t *lists[QUEUE]; /* of their transfers */
    size_t capacities[QUEUE];
    uint64_t submitted; /* groups that the thread was given, */
    uint64_t enqueued;  /* has given to NCCL, */
    uint64_t passed;    /* and has seen to have moved */
    wsync_error_t failure;
    bool met;
    bool closing;
    bool ended; /* the thread is about to return */
};

static const char name[] = "nccl";

static wsync_status_t fail_closing(wsync_error_t *err)
{
    return wsync_fail(err, WSYNC_ERR_CLOSED, 0, name, "the communicator was closed here");
}

static bool is_closing(wsync_nccl_communicator_t *self)
{
    bool closing;

    (void)pthread_mutex_lock(&self->mutex);
    closing = self->closing;
    (void)pthread_mutex_unlock(&self->mutex);
    return closing;
}

/* --- the thread ----------------------------------------------------------------------- */

static bool has_come(const wsync_nccl_point_t *point)
{
    return point->event.memory == NULL || wsync_event_query(point->event) >= point->value;
}

static wsync_status_t fail_late(const wsync_nccl_communicator_t *self,
                                const wsync_nccl_group_t *group, wsync_error_t *err)
{
    return wsync_fail(err, WSYNC_ERR_CLOSED, 0, name,
                      "round %u: rank %u of %u has not moved its bytes in %d s",
                      group->round, self->rank, self->rank_count, self->timeout_ms / 1000);
}

/* What was attempted, for messages: a group, or (NULL) to meet. */
static void describe(const wsync_nccl_communicator_t *self, const wsync_nccl_group_t *group,
                     char text[WHAT_NBYTES])
{
    if (group == NULL) {
        (void)snprintf(text, WHAT_NBYTES, "rank %u of %u", self->rank, self->rank_count);
    } else {
        (void)snprintf(text, WHAT_NBYTES, "round %u: rank %u of %u", group->round,
                       self->rank, self->rank_count);
    }
}

/* OK if the call went well; else its error, with what was attempted. */
static wsync_status_t check_call(wsync_nccl_communicator_t *self,
                                 wsync_nccl_result_t result, const char *call,
                                 const wsync_nccl_group_t *group, wsync_error_t *err)
{
    char what[WHAT_NBYTES];

    if (result == WSYNC_NCCL_SUCCESS) {
        return WSYNC_OK;
    }
    describe(self, group, what);
    return wsync_nccl_check(self->library, result, call, err, "%s", what);
}

/* Waits until NCCL has done what it was asked for; only this may be called meanwhile. */
static wsync_status_t settle(wsync_nccl_communicator_t *self, const char *call,
                             const wsync_nccl_group_t *group, int64_t deadline_ms,
                             wsync_error_t *err)
{
    struct timespec pause = {.tv_nsec = PAUSE_NS};
    char what[WHAT_NBYTES];

    for (unsigned asked = 1;; asked++) {
        wsync_nccl_result_t state = WSYNC_NCCL_SUCCESS;
        const wsync_nccl_result_t result =
            self->library->comm_get_async_error(self->comm, &state);

        if (result != WSYNC_NCCL_SUCCESS) {
            return check_call(self, result, "ncclCommGetAsyncError", group, err);
        }
        if (state != WSYNC_NCCL_IN_PROGRESS) {
            return check_call(self, state, call, group, err);
        }
        if (asked < ASKS) {
            continue;
        }
        if (is_closing(self)) {
            return fail_closing(err);
        }
        if (wsync_clock_ms() >= deadline_ms) {
            describe(self, group, what);
            return wsync_fail(err, WSYNC_ERR_CLOSED, 0, call,
                              "%s: %s is not done after %d s", what, call,
                              self->timeout_ms / 1000);
        }
        (void)nanosleep(&pause, NULL);
        pause.tv_nsec = pause.tv_nsec < MAX_PAUSE_NS / 2 ? 2 * pause.tv_nsec : MAX_PAUSE_NS;
    }
}

/* Whether a call went well, or has begun to. */
static bool accepted(wsync_nccl_result_t result)
{
    return result == WSYNC_NCCL_SUCCESS || result == WSYNC_NCCL_IN_PROGRESS;
}

static wsync_status_t init_communicator(wsync_nccl_communicator_t *self, wsync_error_t *err)
{
    wsync_nccl_config_t config = WSYNC_NCCL_CONFIG_INIT;
    wsync_nccl_result_t result;

    config.blocking = 0;
    config.min_ctas = 1;
    config.max_ctas = MAX_CTAS;
    config.split_share = 0;
    result = self->library->comm_init(&self->comm, (int)self->rank_count, self->id,
                                      (int)self->rank, &config);
    if (!accepted(result)) {
        return check_call(self, result, "ncclCommInitRankConfig", NULL, err);
    }
    /* Who waits for this has a deadline of its own, and closes. */
    return settle(self, "ncclCommInitRankConfig", NULL, INT64_MAX, err);
}

static wsync_nccl_result_t begin_transfer(const wsync_nccl_communicator_t *self,
                                          const wsync_nccl_transfer_t *transfer)
{
    const wsync_nccl_library_t *library = self->library;
    const wsync_cu_stream_t stream = wsync_stream_handle(self->stream);
    const int peer = (int)transfer->peer;
    const size_t count = transfer->nbytes;

    switch (transfer->way) {
    case WSYNC_NCCL_SEND:
        return library->send(transfer->data, count, WSYNC_NCCL_UINT8, peer, self->comm,
                             stream);
    case WSYNC_NCCL_RECEIVE:
        return library->recv(transfer->data, count, WSYNC_NCCL_UINT8, peer, self->comm,
                             stream);
    default:
        return library->broadcast(transfer->data, transfer->data, count, WSYNC_NCCL_UINT8,
                                  peer, self->comm, stream);
    }
}

/* All calls of a group; what one of them refuses ends the communicator. */
static wsync_status_t begin_transfers(wsync_nccl_communicator_t *self,
                                      const wsync_nccl_group_t *group, wsync_error_t *err)
{
    const wsync_nccl_library_t *library = self->library;
    wsync_nccl_result_t result = library->group_start();
    wsync_nccl_result_t last;

    if (!accepted(result)) {
        return check_call(self, result, "ncclGroupStart", group, err);
    }
    for (size_t i = 0; i < group->count && accepted(result); i++) {
        result = begin_transfer(self, &group->transfers[i]);
    }
    last = library->group_end();
    if (!accepted(result) || !accepted(last)) {
        return check_call(self, accepted(result) ? last : result, "ncclGroupEnd", group,
                          err);
    }
    return settle(self, "ncclGroupEnd", group, wsync_clock_ms() + self->timeout_ms, err);
}

static wsync_status_t run_group(wsync_nccl_communicator_t *self,
                                const wsync_nccl_group_t *group, wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    for (size_t i = 0; i < WSYNC_NCCL_MAX_BEGINS && status == WSYNC_OK; i++) {
        const wsync_nccl_point_t *begin = &group->begins[i];

        if (begin->event.memory != NULL) {
            status = wsync_stream_wait(self->stream, begin->event, begin->value, err);
        }
    }
    if (status == WSYNC_OK) {
        status = begin_transfers(self, group, err);
    }
    return status == WSYNC_OK
               ? wsync_stream_record(self->stream, group->end.event, group->end.value, err)
               : status;
}

/* Looks after the oldest group that has not moved. */
static wsync_status_t watch(wsync_nccl_communicator_t *self,
                            const wsync_nccl_group_t *group, wsync_error_t *err)
{
    wsync_nccl_result_t state = WSYNC_NCCL_SUCCESS;
    wsync_nccl_result_t result;
    const int64_t now = wsync_clock_ms();

    if (has_come(&group->end)) {
        return WSYNC_OK;
    }
    result = self->library->comm_get_async_error(self->comm, &state);
    if (result != WSYNC_NCCL_SUCCESS || !accepted(state)) {
        return check_call(self, result != WSYNC_NCCL_SUCCESS ? result : state,
                          "ncclCommGetAsyncError", group, err);
    }
    if (self->begun_ms == 0 && has_come(&group->begins[0]) && has_come(&group->begins[1])) {
        self->begun_ms = now;
    }
    return self->begun_ms != 0 && now - self->begun_ms > self->timeout_ms
               ? fail_late(self, group, err)
               : WSYNC_OK;
}

/* Takes note of groups that have moved; with the mutex. */
static void pass(wsync_nccl_communicator_t *self)
{
    while (self->passed < self->enqueued &&
           has_come(&self->groups[self->passed % QUEUE].end)) {
        self->passed++;
    }
}

typedef enum work {
    WORK_END, /* the communicator is being closed */
    WORK_NONE,
    WORK_BEGIN,
    WORK_WATCH,
} work_t;

/* With the mutex: what comes next, and for which group. */
static work_t choose(const wsync_nccl_communicator_t *self, wsync_nccl_group_t *group)
{
    if (self->closing) {
        return WORK_END;
    }
    if (self->enqueued < self->submitted) {
        *group = self->groups[self->enqueued % QUEUE];
        return WORK_BEGIN;
    }
    if (self->passed < self->enqueued) {
        *group = self->groups[self->passed % QUEUE];
        return WORK_WATCH;
    }
    return WORK_NONE;
}

/* Waits a while for something to do. */
static work_t next_work(wsync_nccl_communicator_t *self, wsync_nccl_group_t *group)
{
    work_t work;

    (void)pthread_mutex_lock(&self->mutex);
    pass(self);
    work = choose(self, group);
    if (work == WORK_NONE || work == WORK_WATCH) {
        const uint64_t until = wsync_deadline_ns(work == WORK_WATCH ? LOOK_MS : IDLE_MS);
        const struct timespec when = {.tv_sec = (time_t)(until / 1000000000),
                                      .tv_nsec = (long)(until % 1000000000)};

        (void)pthread_cond_timedwait(&self->changed, &self->mutex, &when);
        pass(self);
        work = choose(self, group);
    }
    if (self->watched != self->passed) {
        self->watched = self->passed;
        self->begun_ms = 0;
    }
    (void)pthread_mutex_unlock(&self->mutex);
    return work;
}

static void publish(wsync_nccl_communicator_t *self, wsync_status_t status,
                    const wsync_error_t *err)
{
    (void)pthread_mutex_lock(&self->mutex);
    if (status != WSYNC_OK && self->failure.status == WSYNC_OK) {
        self->failure = *err;
    }
    self->met = self->met || status == WSYNC_OK;
    (void)pthread_cond_broadcast(&self->changed);
    (void)pthread_mutex_unlock(&self->mutex);
}

static wsync_status_t serve(wsync_nccl_communicator_t *self, wsync_error_t *err)
{
    wsync_nccl_group_t group = {.count = 0};
    work_t work = WORK_NONE;
    wsync_status_t status = init_communicator(self, err);

    publish(self, status, err);
    while (status == WSYNC_OK && work != WORK_END) {
        work = next_work(self, &group);
        if (work == WORK_WATCH) {
            status = watch(self, &group, err);
        } else if (work == WORK_BEGIN) {
            status = run_group(self, &group, err);
        }
        if (work == WORK_BEGIN) {
            (void)pthread_mutex_lock(&self->mutex);
            self->enqueued++;
            (void)pthread_cond_broadcast(&self->changed);
            (void)pthread_mutex_unlock(&self->mutex);
        }
    }
    return status;
}

static void *thread_main(void *context)
{
    wsync_nccl_communicator_t *self = context;
    const wsync_cuda_device_t *device = wsync_cuda_of(self->device);
    wsync_error_t err = {0};
    wsync_status_t status = wsync_cuda_enter(device, &err);

    (void)prctl(PR_SET_TIMERSLACK, SLACK_NS);
    if (status == WSYNC_OK) {
        status = serve(self, &err);
        /* Before anything is given up: who sees an event then, sees this, too. */
        publish(self, status, &err);
        /* Kernels that wait for an event would not see the abort. */
        (void)wsync_stream_abandon(self->stream, 0);
        if (self->comm != NULL) {
            (void)self->library->comm_abort(self->comm);
        }
        (void)wsync_stream_abandon(self->stream, CLOSE_MS);
        wsync_cuda_leave(device);
    } else {
        publish(self, status, &err);
    }
    (void)pthread_mutex_lock(&self->mutex);
    self->ended = true;
    (void)pthread_cond_broadcast(&self->changed);
    (void)pthread_mutex_unlock(&self->mutex);
    return NULL;
}

/* --- its callers ---------------------------------------------------------------------- */

/* False: the device may still run what it was given. */
static bool free_communicator(wsync_nccl_communicator_t *self)
{
    const bool dry = wsync_stream_destroy(self->stream);

    (void)pthread_cond_destroy(&self->changed);
    (void)pthread_mutex_destroy(&self->mutex);
    for (size_t i = 0; i < QUEUE; i++) {
        free(self->lists[i]);
    }
    free(self);
    return dry;
}

wsync_status_t wsync_nccl_communicator_create(const wsync_nccl_library_t *library,
                                              const wsync_device_t *device,
                                              const wsync_nccl_id_t *id, uint32_t rank,
                                              uint32_t rank_count, int timeout_ms,
                                              wsync_nccl_communicator_t **communicator,
                                              wsync_error_t *err)
{
    wsync_nccl_communicator_t *made = calloc(1, sizeof(*made));
    pthread_condattr_t attributes;
    sigset_t before;
    sigset_t all;
    wsync_status_t status;
    int code;

    if (made == NULL) {
        return wsync_no_memory(err, name);
    }
    made->library = library;
    made->device = device;
    made->id = *id;
    made->rank = rank;
    made->rank_count = rank_count;
    made->timeout_ms = timeout_ms;
    made->pid = getpid();
    status = wsync_stream_create(device, 1, &made->stream, err);
    if (status != WSYNC_OK) {
        free(made);
        return status;
    }
    (void)pthread_mutex_init(&made->mutex, NULL);
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&made->changed, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    /* Signals are the main thread's business, also in threads that NCCL makes. */
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    code = pthread_create(&made->thread, NULL, thread_main, made);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0) {
        (void)free_communicator(made);
        return wsync_fail(err, WSYNC_ERR_OS, code, "pthread_create", "pthread_create: %s",
                          strerror(code));
    }
    (void)pthread_setname_np(made->thread, "wsync-nccl");
    *communicator = made;
    return WSYNC_OK;
}

/* Waits for a change until the deadline; with the mutex.  False: it has passed. */
static bool await_change(wsync_nccl_communicator_t *self, int64_t deadline_ms)
{
    const struct timespec when = {.tv_sec = (time_t)(deadline_ms / 1000),
                                  .tv_nsec = (long)(deadline_ms % 1000) * 1000000};

    return wsync_clock_ms() < deadline_ms &&
           (pthread_cond_timedwait(&self->changed, &self->mutex, &when) == 0 ||
            wsync_clock_ms() < deadline_ms);
}

wsync_status_t wsync_nccl_communicator_meet(wsync_nccl_communicator_t *communicator,
                                            int64_t deadline_ms, wsync_error_t *err)
{
    wsync_nccl_communicator_t *self = communicator;
    wsync_status_t status;

    (void)pthread_mutex_lock(&self->mutex);
    while (!self->met && self->failure.status == WSYNC_OK &&
           await_change(self, deadline_ms)) {
    }
    status = self->failure.status;
    if (status != WSYNC_OK && err != NULL) {
        *err = self->failure;
    } else if (status == WSYNC_OK && !self->met) {
        status = wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, name,
                            "rank %u waits for the others of %u ranks to meet by NCCL",
                            self->rank, self->rank_count);
    }
    (void)pthread_mutex_unlock(&self->mutex);
    return status;
}

/* Keeps a group in the queue; with the mutex. */
static wsync_status_t keep(wsync_nccl_communicator_t *self, const wsync_nccl_group_t *group,
                           wsync_error_t *err)
{
    const size_t at = self->submitted % QUEUE;
    wsync_nccl_transfer_t *list = wsync_array_reserve(
        self->lists[at], &self->capacities[at], group->count, sizeof(*list));

    if (list == NULL) {
        return wsync_no_memory(err, name);
    }
    memcpy(list, group->transfers, group->count * sizeof(*list));
    self->lists[at] = list;
    self->groups[at] = *group;
    self->groups[at].transfers = list;
    self->submitted++;
    return WSYNC_OK;
}

wsync_status_t wsync_nccl_communicator_submit(wsync_nccl_communicator_t *communicator,
                                              const wsync_nccl_group_t *group,
                                              wsync_error_t *err)
{
    wsync_nccl_communicator_t *self = communicator;
    wsync_status_t status;

    (void)pthread_mutex_lock(&self->mutex);
    pass(self);
    status = self->failure.status;
    if (status != WSYNC_OK && err != NULL) {
        *err = self->failure;
    } else if (status == WSYNC_OK && self->submitted - self->passed >= QUEUE) {
        status = wsync_fail(err, WSYNC_ERR_STATE, 0, name,
                            "round %u: the bytes of %d earlier groups have not moved yet",
                            group->round, QUEUE);
    } else if (status == WSYNC_OK) {
        status = keep(self, group, err);
        (void)pthread_cond_broadcast(&self->changed);
    }
    (void)pthread_mutex_unlock(&self->mutex);
    return status;
}

/* Whether the thread still has to begin a group of a round; with the mutex. */
static bool is_ahead(const wsync_nccl_communicator_t *self, uint32_t round)
{
    for (uint64_t i = self->enqueued; i < self->submitted; i++) {
        if (self->groups[i % QUEUE].round == round) {
            return true;
        }
    }
    return false;
}

wsync_status_t wsync_nccl_communicator_begun(wsync_nccl_communicator_t *communicator,
                                             uint32_t round, int64_t deadline_ms,
                                             wsync_error_t *err)
{
    wsync_nccl_communicator_t *self = communicator;
    wsync_status_t status;

    (void)pthread_mutex_lock(&self->mutex);
    while (is_ahead(self, round) && self->failure.status == WSYNC_OK &&
           await_change(self, deadline_ms)) {
    }
    status = self->failure.status;
    if (status != WSYNC_OK && err != NULL) {
        *err = self->failure;
    } else if (status == WSYNC_OK && is_ahead(self, round)) {
        status = wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, name,
                            "deadline passed: NCCL has not taken round %u", round);
    }
    (void)pthread_mutex_unlock(&self->mutex);
    return status;
}

wsync_status_t wsync_nccl_communicator_check(wsync_nccl_communicator_t *communicator,
                                             wsync_error_t *err)
{
    wsync_status_t status;

    (void)pthread_mutex_lock(&communicator->mutex);
    status = communicator->failure.status;
    if (status != WSYNC_OK && err != NULL) {
        *err = communicator->failure;
    }
    (void)pthread_mutex_unlock(&communicator->mutex);
    return status;
}

void wsync_nccl_communicator_close(wsync_nccl_communicator_t *communicator)
{
    const int64_t deadline = wsync_deadline_ms(CLOSE_MS);

    if (communicator->pid != getpid()) {
        return; /* a fork has no thread, and no use of the device */
    }
    (void)pthread_mutex_lock(&communicator->mutex);
    communicator->closing = true;
    (void)pthread_cond_broadcast(&communicator->changed);
    while (!communicator->ended && await_change(communicator, deadline)) {
    }
    (void)pthread_mutex_unlock(&communicator->mutex);
}

bool wsync_nccl_communicator_destroy(wsync_nccl_communicator_t *communicator)
{
    bool ended;

    if (communicator == NULL) {
        return true;
    }
    if (communicator->pid != getpid()) {
        return false;
    }
    wsync_nccl_communicator_close(communicator);
    (void)pthread_mutex_lock(&communicator->mutex);
    ended = communicator->ended;
    (void)pthread_mutex_unlock(&communicator->mutex);
    if (!ended) {
        (void)pthread_detach(communicator->thread);
        return false;
    }
    (void)pthread_join(communicator->thread, NULL);
    return free_communicator(communicator);
}
