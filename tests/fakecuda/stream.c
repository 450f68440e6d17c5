/* SPDX-License-Identifier: Apache-2.0
 * Streams: a thread each, that pauses at random before every operation. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

enum { POLL_NS = 50 * 1000 };

EXPORT int fakecuda_enqueue(void *stream, const fakecuda_work_t *work);

static void pause_ns(long ns)
{
    const struct timespec time = {.tv_nsec = ns};

    (void)nanosleep(&time, NULL);
}

static void pause_shortly(void)
{
    pause_ns(POLL_NS);
}

static void pause_unlocked(void)
{
    fake_unlock();
    pause_shortly();
    fake_lock();
}

static uint64_t now_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void record(struct wsync_cu_event *event, uint64_t value)
{
    uint64_t seen = atomic_load(&event->completed);

    __atomic_store_n(&event->when, now_ns(), __ATOMIC_RELAXED);
    while (seen < value && !atomic_compare_exchange_weak(&event->completed, &seen, value)) {
    }
}

/* Whether an operation that waits for something may end. */
static bool has_come(const fake_op_t *op, const uint64_t *word)
{
    if (atomic_load(&fake.lost) != 0) {
        return true;
    }
    return (int64_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - op->value) >= 0;
}

static void run(const fake_op_t *op)
{
    void *destination = fakecuda_reach((const void *)op->destination);

    switch (op->kind) {
    case FAKE_COPY:
        memmove(destination, fakecuda_reach((const void *)op->source), op->nbytes);
        return;
    case FAKE_SET:
        memset(destination, (int)op->value, op->nbytes);
        return;
    case FAKE_WRITE_VALUE:
        __atomic_store_n((uint64_t *)destination, op->value, __ATOMIC_RELEASE);
        return;
    case FAKE_WAIT_VALUE:
        while (!has_come(op, destination)) {
            pause_shortly();
        }
        return;
    case FAKE_RECORD:
        record(op->event, op->value);
        return;
    case FAKE_LAUNCH:
        if (!fake_launch_faults()) {
            op->kernel->run(op->grid, op->block, op->parameters);
        }
        return;
    case FAKE_WORK:
        while (atomic_load(&fake.lost) == 0 && !op->work.step(op->work.argument)) {
            pause_shortly();
        }
        return;
    }
}

/* Its spans are its own, and go with it. */
static void end_work(fake_op_t *op)
{
    if (op->kind == FAKE_WORK) {
        fake_lock();
        op->work.span_count = 0;
        fake_unlock();
        op->work.end(op->work.argument);
    }
}

/* Takes a stream that has run dry off the list. */
static void free_stream(struct wsync_cu_stream *stream)
{
    for (struct wsync_cu_stream **at = &fake.streams; *at != NULL; at = &(*at)->next) {
        if (*at == stream) {
            *at = stream->next;
            break;
        }
    }
    (void)pthread_cond_destroy(&stream->changed);
    free(stream);
}

/* Whether another stream has yet to pass what was enqueued before an operation. */
static bool is_blocked(const struct wsync_cu_stream *self, const fake_op_t *op)
{
    for (const struct wsync_cu_stream *at = fake.streams; at != NULL; at = at->next) {
        if (at != self && at->channel == self->channel && at->priority == self->priority &&
            at->context == self->context && at->head != NULL &&
            at->head->number < op->number) {
            return true;
        }
    }
    return false;
}

/* Whether some stream of a context has not passed what was enqueued before a number. */
static bool is_behind(const struct wsync_cu_context *context, uint64_t number)
{
    for (const struct wsync_cu_stream *at = fake.streams; at != NULL; at = at->next) {
        if (at->context == context && at->head != NULL && at->head->number < number) {
            return true;
        }
    }
    return false;
}

static void *stream_main(void *argument)
{
    struct wsync_cu_stream *stream = argument;

    fake_lock();
    for (;;) {
        fake_op_t *op = stream->head;

        if (op == NULL && stream->destroyed) {
            break;
        }
        if (op == NULL) {
            (void)pthread_cond_wait(&stream->changed, &fake.mutex);
            continue;
        }
        while (atomic_load(&fake.lost) == 0 && fake.connections > 0 &&
               is_blocked(stream, op)) {
            pause_unlocked();
        }
        stream->running = true;
        fake_unlock();
        if (fake.delay_us > 0) {
            pause_ns((long)((unsigned)rand_r(&stream->seed) % fake.delay_us) * 1000);
        }
        if (atomic_load(&fake.lost) == 0) {
            run(op);
        }
        end_work(op);
        fake_lock();
        stream->running = false;
        stream->head = op->next;
        if (stream->head == NULL) {
            stream->tail = NULL;
        }
        if (op->event != NULL) {
            op->event->pending--;
            fake_event_let_go(op->event);
        }
        free(op);
        (void)pthread_cond_broadcast(&stream->changed);
    }
    free_stream(stream);
    fake_unlock();
    return NULL;
}

void fake_streams_lose(wsync_cu_result_t code)
{
    struct wsync_cu_stream *stream;

    atomic_store(&fake.lost, code);
    fake_lock();
    do {
        stream = fake.streams;
        while (stream != NULL && !stream->running) {
            stream = stream->next;
        }
        if (stream != NULL) {
            pause_unlocked();
        }
    } while (stream != NULL);
    fake_unlock();
}

/* Until the streams of a context have passed what they have; locked. */
static void run_dry(const struct wsync_cu_context *context)
{
    const uint64_t number = fake.next_number + 1;

    while (is_behind(context, number) && atomic_load(&fake.lost) == 0) {
        pause_unlocked();
    }
}

wsync_cu_result_t fake_context_synchronize(void)
{
    struct wsync_cu_context *context = NULL;
    wsync_cu_result_t code = fake_enter_context("cuCtxSynchronize", &context);

    if (code == WSYNC_CU_SUCCESS) {
        fake_lock();
        run_dry(context);
        fake_unlock();
        code = atomic_load(&fake.lost);
    }
    return code;
}

/* A queue of its priority; locked. */
static size_t next_channel(int priority)
{
    size_t *next = &fake.next_channels[-priority];

    return fake.connections > 0 ? (*next)++ % fake.connections : 0;
}

static wsync_cu_result_t make_stream(const char *call, unsigned flags, int priority,
                                     wsync_cu_stream_t *stream)
{
    struct wsync_cu_context *context = NULL;
    struct wsync_cu_stream *made;
    pthread_attr_t attributes;
    pthread_t thread;
    wsync_cu_result_t code = fake_enter_context(call, &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    made = calloc(1, sizeof(*made));
    if (made == NULL || flags > WSYNC_CU_STREAM_NON_BLOCKING || priority > 0 ||
        priority < 1 - fake.priorities) {
        free(made);
        return WSYNC_CU_INVALID_VALUE;
    }
    made->context = context;
    made->priority = priority;
    (void)pthread_cond_init(&made->changed, NULL);
    (void)pthread_attr_init(&attributes);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    fake_lock();
    made->seed = fake.seed++;
    made->channel = next_channel(priority);
    made->next = fake.streams;
    fake.streams = made;
    if (pthread_create(&thread, &attributes, stream_main, made) != 0) {
        free_stream(made);
        code = WSYNC_CU_OPERATING_SYSTEM;
    } else {
        *stream = made;
    }
    fake_unlock();
    (void)pthread_attr_destroy(&attributes);
    return code;
}

wsync_cu_result_t fake_stream_create(wsync_cu_stream_t *stream, unsigned flags)
{
    return make_stream("cuStreamCreate", flags, 0, stream);
}

wsync_cu_result_t fake_stream_create_with_priority(wsync_cu_stream_t *stream,
                                                   unsigned flags, int priority)
{
    return make_stream("cuStreamCreateWithPriority", flags, priority, stream);
}

/* The stream if it lives and belongs to the context (NULL: to any); locked. */
static wsync_cu_result_t check_stream(const char *call,
                                      const struct wsync_cu_stream *stream,
                                      const struct wsync_cu_context *context)
{
    for (const struct wsync_cu_stream *at = fake.streams; at != NULL; at = at->next) {
        if (at == stream && !at->destroyed) {
            return context == NULL || at->context == context ? WSYNC_CU_SUCCESS
                                                             : WSYNC_CU_INVALID_CONTEXT;
        }
    }
    return fake_refuse(WSYNC_CU_INVALID_HANDLE, "%s: no such stream, or destroyed", call);
}

/* Copies `op` to the end of the stream's queue; locked. */
static wsync_cu_result_t enqueue(struct wsync_cu_stream *stream, const fake_op_t *op)
{
    fake_op_t *made = malloc(sizeof(*made));

    if (made == NULL) {
        return WSYNC_CU_OUT_OF_MEMORY;
    }
    *made = *op;
    made->next = NULL;
    made->number = ++fake.next_number;
    if (stream->tail != NULL) {
        stream->tail->next = made;
    } else {
        stream->head = made;
    }
    stream->tail = made;
    if (op->event != NULL) {
        op->event->pending++;
    }
    (void)pthread_cond_broadcast(&stream->changed);
    return WSYNC_CU_SUCCESS;
}

static bool overlaps(fakecuda_span_t range, uintptr_t at, size_t nbytes)
{
    return nbytes > 0 && at < range.at + range.nbytes && range.at < at + nbytes;
}

static bool op_uses(const fake_op_t *op, fakecuda_span_t range)
{
    for (size_t i = 0; i < op->work.span_count; i++) {
        const fakecuda_span_t *span = &op->work.spans[i];

        if (overlaps(range, span->at, span->nbytes)) {
            return true;
        }
    }
    return overlaps(range, op->destination, op->nbytes) ||
           (op->kind == FAKE_COPY && overlaps(range, op->source, op->nbytes));
}

bool fake_range_busy(uintptr_t at, size_t nbytes)
{
    for (const struct wsync_cu_stream *stream = fake.streams; stream != NULL;
         stream = stream->next) {
        for (const fake_op_t *op = stream->head; op != NULL; op = op->next) {
            if (op_uses(op, (fakecuda_span_t){at, nbytes})) {
                return true;
            }
        }
    }
    return false;
}

wsync_cu_result_t fake_stream_destroy(wsync_cu_stream_t stream)
{
    struct wsync_cu_context *context = NULL;
    wsync_cu_result_t code = fake_enter_return("cuStreamDestroy", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    code = check_stream("cuStreamDestroy", stream, context);
    if (code == WSYNC_CU_SUCCESS) {
        stream->destroyed = true; /* the thread ends when nothing is left */
        (void)pthread_cond_broadcast(&stream->changed);
    }
    fake_unlock();
    return fake_leave(code);
}

wsync_cu_result_t fake_stream_query(wsync_cu_stream_t stream)
{
    struct wsync_cu_context *context = NULL;
    wsync_cu_result_t code = fake_enter_context("cuStreamQuery", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    code = check_stream("cuStreamQuery", stream, context);
    if (code == WSYNC_CU_SUCCESS && stream->head != NULL) {
        code = WSYNC_CU_NOT_READY;
    }
    if (code == WSYNC_CU_SUCCESS) {
        code = atomic_load(&fake.lost); /* since the call began */
    }
    fake_unlock();
    return code;
}

wsync_cu_result_t fake_stream_synchronize(wsync_cu_stream_t stream)
{
    struct wsync_cu_context *context = NULL;
    wsync_cu_result_t code = fake_enter_context("cuStreamSynchronize", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    if (stream != NULL) { /* nobody gives the default stream anything */
        code = check_stream("cuStreamSynchronize", stream, context);
    }
    while (code == WSYNC_CU_SUCCESS && stream != NULL && stream->head != NULL) {
        (void)pthread_cond_wait(&stream->changed, &fake.mutex);
    }
    if (code == WSYNC_CU_SUCCESS) {
        code = atomic_load(&fake.lost); /* since the call began */
    }
    fake_unlock();
    return code;
}

/* Which side of a copy may be memory that only the host reaches. */
typedef enum host_side {
    HOST_NONE,
    HOST_SOURCE,
    HOST_DESTINATION,
} host_side_t;

/* What every operation is checked for. */
static wsync_cu_result_t submit(const char *call, struct wsync_cu_stream *stream,
                                const struct wsync_cu_context *context, const fake_op_t *op,
                                host_side_t side)
{
    wsync_cu_result_t code;

    fake_lock();
    code = check_stream(call, stream, context);
    if (code == WSYNC_CU_SUCCESS && op->nbytes > 0) {
        code =
            fake_check_range(call, op->destination, op->nbytes, side == HOST_DESTINATION);
    }
    if (code == WSYNC_CU_SUCCESS && op->kind == FAKE_COPY) {
        code = fake_check_range(call, op->source, op->nbytes, side == HOST_SOURCE);
    }
    if (code == WSYNC_CU_SUCCESS && (op->nbytes > 0 || op->kind == FAKE_LAUNCH)) {
        code = enqueue(stream, op);
    }
    fake_unlock();
    return code;
}

static wsync_cu_result_t copy(const char *call, uintptr_t destination, uintptr_t source,
                              size_t nbytes, struct wsync_cu_stream *stream,
                              host_side_t side)
{
    const fake_op_t op = {
        .kind = FAKE_COPY, .destination = destination, .source = source, .nbytes = nbytes};
    struct wsync_cu_context *context = NULL;
    const wsync_cu_result_t code = fake_enter_context(call, &context);

    return code != WSYNC_CU_SUCCESS ? code : submit(call, stream, context, &op, side);
}

/* The real one takes pageable memory too, and keeps the caller until the stream has come to
 * the copy: for wsync that is an error. */
wsync_cu_result_t fake_memcpy_async(wsync_cu_ptr_t destination, wsync_cu_ptr_t source,
                                    size_t nbytes, wsync_cu_stream_t stream)
{
    return copy("cuMemcpyAsync", (uintptr_t)destination, (uintptr_t)source, nbytes, stream,
                HOST_NONE);
}

/* One attribute for all copies, whose sources are read in the stream's order. */
static bool good_batch(size_t count, const wsync_cu_copy_attributes_t *attributes,
                       const size_t *attribute_starts, size_t attribute_count)
{
    return count > 0 && attribute_count == 1 && attribute_starts[0] == 0 &&
           attributes->source_order == WSYNC_CU_COPY_ORDER_STREAM &&
           (attributes->flags & ~(unsigned)WSYNC_CU_COPY_BESIDE_KERNELS) == 0;
}

/* Copies of a batch have no order, and here the last comes first: a copy that fails leaves
 * those behind it enqueued. */
wsync_cu_result_t fake_memcpy_batch_async(wsync_cu_ptr_t *destinations,
                                          wsync_cu_ptr_t *sources, size_t *sizes,
                                          size_t count,
                                          wsync_cu_copy_attributes_t *attributes,
                                          size_t *attribute_starts, size_t attribute_count,
                                          size_t *failed, wsync_cu_stream_t stream)
{
    struct wsync_cu_context *context = NULL;
    wsync_cu_result_t code = fake_enter_context("cuMemcpyBatchAsync", &context);

    *failed = SIZE_MAX;
    if (code == WSYNC_CU_SUCCESS &&
        !good_batch(count, attributes, attribute_starts, attribute_count)) {
        return WSYNC_CU_INVALID_VALUE;
    }
    for (size_t i = count; i-- > 0 && code == WSYNC_CU_SUCCESS;) {
        const fake_op_t op = {.kind = FAKE_COPY,
                              .destination = (uintptr_t)destinations[i],
                              .source = (uintptr_t)sources[i],
                              .nbytes = sizes[i]};

        code = sizes[i] == 0
                   ? WSYNC_CU_INVALID_VALUE
                   : submit("cuMemcpyBatchAsync", stream, context, &op, HOST_NONE);
        *failed = code != WSYNC_CU_SUCCESS ? i : SIZE_MAX;
    }
    return code;
}

wsync_cu_result_t fake_memcpy_in_async(wsync_cu_ptr_t destination, const void *source,
                                       size_t nbytes, wsync_cu_stream_t stream)
{
    if (fake.sizes) {
        fake_log("size %zu", nbytes);
    }
    return copy("cuMemcpyHtoDAsync", (uintptr_t)destination, (uintptr_t)source, nbytes,
                stream, HOST_SOURCE);
}

wsync_cu_result_t fake_memcpy_out_async(void *destination, wsync_cu_ptr_t source,
                                        size_t nbytes, wsync_cu_stream_t stream)
{
    return copy("cuMemcpyDtoHAsync", (uintptr_t)destination, (uintptr_t)source, nbytes,
                stream, HOST_DESTINATION);
}

wsync_cu_result_t fake_memset_async(wsync_cu_ptr_t at, unsigned char value, size_t nbytes,
                                    wsync_cu_stream_t stream)
{
    const fake_op_t op = {
        .kind = FAKE_SET, .destination = (uintptr_t)at, .nbytes = nbytes, .value = value};
    struct wsync_cu_context *context = NULL;
    const wsync_cu_result_t code = fake_enter_context("cuMemsetD8Async", &context);

    return code != WSYNC_CU_SUCCESS
               ? code
               : submit("cuMemsetD8Async", stream, context, &op, HOST_NONE);
}

static wsync_cu_result_t word(const char *call, fake_op_kind_t kind, wsync_cu_ptr_t at,
                              uint64_t value, unsigned flags,
                              struct wsync_cu_stream *stream)
{
    const fake_op_t op = {.kind = kind,
                          .destination = (uintptr_t)at,
                          .nbytes = sizeof(uint64_t),
                          .value = value};
    struct wsync_cu_context *context = NULL;
    const wsync_cu_result_t code = fake_enter_context(call, &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    if (at % sizeof(uint64_t) != 0 || flags != 0) {
        return WSYNC_CU_INVALID_VALUE;
    }
    return submit(call, stream, context, &op, HOST_NONE);
}

wsync_cu_result_t fake_stream_write_value(wsync_cu_stream_t stream, wsync_cu_ptr_t at,
                                          uint64_t value, unsigned flags)
{
    return word("cuStreamWriteValue64", FAKE_WRITE_VALUE, at, value, flags, stream);
}

wsync_cu_result_t fake_stream_wait_value(wsync_cu_stream_t stream, wsync_cu_ptr_t at,
                                         uint64_t value, unsigned flags)
{
    return word("cuStreamWaitValue64", FAKE_WAIT_VALUE, at, value, flags, stream);
}

wsync_cu_result_t fake_event_record(wsync_cu_event_t event, wsync_cu_stream_t stream)
{
    const char *call = "cuEventRecord";
    fake_op_t op = {.kind = FAKE_RECORD, .event = event};
    struct wsync_cu_context *context = NULL;
    wsync_cu_result_t code = fake_enter_context(call, &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    code = check_stream(call, stream, context);
    if (code == WSYNC_CU_SUCCESS) {
        code = fake_event_check(call, event, context);
    }
    if (code == WSYNC_CU_SUCCESS) {
        op.value = atomic_fetch_add(&event->recorded, 1) + 1;
        code = enqueue(stream, &op);
    }
    fake_unlock();
    return code;
}

wsync_cu_result_t fake_launch_kernel(wsync_cu_function_t function, unsigned grid_x,
                                     unsigned grid_y, unsigned grid_z, unsigned block_x,
                                     unsigned block_y, unsigned block_z,
                                     unsigned shared_nbytes, wsync_cu_stream_t stream,
                                     void **parameters, void **extra)
{
    fake_op_t op = {.kind = FAKE_LAUNCH, .grid = grid_x, .block = block_x};
    struct wsync_cu_context *context = NULL;
    wsync_cu_result_t code = fake_enter_context("cuLaunchKernel", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    code = fake_kernel_of(function, context, &op.kernel);
    fake_unlock();
    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    if (grid_x == 0 || grid_x > INT32_MAX || block_x == 0 || block_x > op.kernel->block ||
        grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || extra != NULL ||
        shared_nbytes > FAKE_SHARED_NBYTES) {
        return WSYNC_CU_INVALID_VALUE;
    }
    memcpy(op.parameters, parameters[0], op.kernel->nbytes);
    return submit("cuLaunchKernel", stream, context, &op, HOST_NONE);
}

int fakecuda_enqueue(void *stream, const fakecuda_work_t *work)
{
    const fake_op_t op = {.kind = FAKE_WORK, .work = *work};
    wsync_cu_result_t code;

    fake_lock();
    code = check_stream("fakecuda_enqueue", stream, NULL);
    for (size_t i = 0; i < work->span_count && code == WSYNC_CU_SUCCESS; i++) {
        code = fake_check_range("fakecuda_enqueue", work->spans[i].at,
                                work->spans[i].nbytes, false);
    }
    if (code == WSYNC_CU_SUCCESS) {
        code = enqueue(stream, &op);
    }
    fake_unlock();
    return code;
}
