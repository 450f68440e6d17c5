/* SPDX-License-Identifier: Apache-2.0
 * Stream: runs the copies of plans and routes, and keeps what they borrow alive.
 *
 * Worker threads never touch Python objects.  What was enqueued is held in a list with a
 * mark; the stream records each mark in a word of its own after the work it belongs to, and
 * calls that have the interpreter lock drop the holds whose marks have passed. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "python/call.h"
#include "python/convert.h"
#include "python/device_types.h"
#include "python/plan.h"
#include "python/quantiser.h"
#include "python/route.h"

enum {
    PROGRESS_NBYTES = 64,
    /* On a GPU a mark is a call of the driver, and work for the device: one for so many. */
    GPU_BATCHES_PER_MARK = 64,
    /* How long a GPU may take to run dry. */
    DRAIN_S = 60,
    /* The most objects that one batch keeps alive. */
    HOLDS = 3,
};

/* Copies to enqueue, and whose memory all of this is; everything is borrowed. */
typedef struct batch {
    wsync_batch_t work;
    PyObject *owners[HOLDS]; /* kept alive until the copies have run */
    long long index;         /* of a trace's label */
    int phase;
} batch_t;

static wsync_event_t progress_event(const StreamObject *self)
{
    return (wsync_event_t){.memory = self->progress, .offset = 0};
}

/* Drops the holds whose marks are at most `passed`.  Dropping may run any Python code, this
 * stream's methods included: the list is in order at every call. */
static void drop_holds(StreamObject *self, uint64_t passed)
{
    while (self->hold_count > 0 && self->holds[0].mark <= passed) {
        PyObject *owner = self->holds[0].owner;

        self->hold_count--;
        memmove(self->holds, self->holds + 1, self->hold_count * sizeof(*self->holds));
        Py_DECREF(owner);
    }
}

static void prune(StreamObject *self)
{
    if (self->hold_count > 0 && self->progress != NULL) {
        drop_holds(self, wsync_event_query(progress_event(self)));
    }
}

/* Has the stream record the next mark; between enter and leave.  Where that fails the holds
 * wait for a later one.  What other threads enqueue meanwhile may come behind this mark,
 * and has a later one. */
static void enqueue_mark(StreamObject *self)
{
    const uint64_t mark = ++self->mark;
    const unsigned marked = self->unmarked;
    wsync_status_t status;

    self->unmarked = 0;
    /* a driver whose queue is full waits, and whoever ends that may need the lock */
    Py_BEGIN_ALLOW_THREADS
        status = wsync_stream_record(self->stream, progress_event(self), mark, NULL);
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        self->unmarked += marked;
    }
}

/* The holds of the batch that was enqueued wait for a mark, if need be for a later one. */
static void mark_batch(StreamObject *self)
{
    self->unmarked++;
    if (self->device->ordinal < 0 || self->unmarked >= GPU_BATCHES_PER_MARK) {
        enqueue_mark(self);
    }
}

/* Makes room before anything is enqueued: afterwards it would be too late to fail. */
static bool reserve_holds(StreamObject *self)
{
    const size_t wanted = self->hold_count + HOLDS * ((size_t)self->users + 1);
    stream_hold_t *holds;

    if (wanted <= self->hold_capacity) {
        return true;
    }
    holds = realloc(self->holds, 2 * wanted * sizeof(*holds));
    if (holds == NULL) {
        return false;
    }
    self->holds = holds;
    self->hold_capacity = 2 * wanted;
    return true;
}

/* Between these two the stream cannot be closed and may be used without the GIL.  enter
 * raises StateError and returns NULL if the stream is closed, NoMemoryError if there is no
 * room for what will be held. */
static wsync_stream_t *enter(ModuleState *state, StreamObject *self)
{
    prune(self); /* may run Python code that closes the stream */
    if (self->stream == NULL) {
        return wsync_py_fail(state, WSYNC_ERR_STATE, "Stream", "the stream is closed");
    }
    if (!reserve_holds(self)) {
        return wsync_py_fail(state, WSYNC_ERR_NO_MEMORY, "Stream",
                             "no memory to hold what the stream uses");
    }
    self->users++;
    return self->stream;
}

static void leave(StreamObject *self)
{
    self->users--;
}

int wsync_py_stream_enter_any(ModuleState *state, PyObject *object, wsync_stream_t **stream)
{
    *stream = NULL;
    if (object == Py_None) {
        return 0;
    }
    if (wsync_py_check_type(object, state->type_Stream, "stream") < 0) {
        return -1;
    }
    *stream = enter(state, (StreamObject *)object);
    return *stream != NULL ? 0 : -1;
}

void wsync_py_stream_leave_any(PyObject *object)
{
    if (object != Py_None) {
        leave((StreamObject *)object);
    }
}

/* Keeps an object that enqueued work borrows from alive until the stream has passed this
 * point.  Up to HOLDS times between enter, which has made room, and
 * leave. */
static void hold(StreamObject *self, PyObject *owner)
{
    Py_INCREF(owner);
    self->holds[self->hold_count++] = (stream_hold_t){self->mark + 1, owner};
}

/* Waits for the workers and lets go of everything, but for what a device that has hung may
 * use yet: that stays as long as the process. */
static void shut(StreamObject *self)
{
    wsync_stream_t *stream = self->stream;
    wsync_memory_t *progress = self->progress;
    bool dry = true;

    if (stream == NULL && progress == NULL) {
        drop_holds(self, UINT64_MAX);
        return;
    }
    self->stream = NULL;
    self->progress = NULL;
    self->closing = true;
    /* A driver may wait for its device where memory is given back, too. */
    Py_BEGIN_ALLOW_THREADS
        if (stream != NULL) {
            dry = wsync_stream_destroy(stream);
        }
        wsync_memory_destroy(progress);
    Py_END_ALLOW_THREADS
    if (!dry) {
        self->hold_count = 0;
    }
    self->closing = false;
    drop_holds(self, UINT64_MAX);
}

static PyObject *stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"threads", "device", NULL};
    ModuleState *state = wsync_py_type_state(type);
    wsync_py_device_arg_t device = {state, wsync_device_host()};
    StreamObject *self = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    int threads = 1;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|iO&:Stream", names, &threads,
                                     wsync_py_convert_device, &device)) {
        return NULL;
    }
    self = (StreamObject *)wsync_py_alloc(type);
    if (self == NULL) {
        return NULL;
    }
    self->device = device.device;
    Py_BEGIN_ALLOW_THREADS
        status = wsync_control_create(self->device, PROGRESS_NBYTES, &self->progress, &err);
        if (status == WSYNC_OK) {
            status = wsync_stream_create(self->device, threads > 0 ? (unsigned)threads : 0,
                                         &self->stream, &err);
        }
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        Py_DECREF(self);
        return wsync_py_raise(state, &err);
    }
    return (PyObject *)self;
}

static int stream_traverse(PyObject *object, visitproc visit, void *arg)
{
    const StreamObject *self = (StreamObject *)object;

    Py_VISIT(Py_TYPE(object));
    for (size_t i = 0; i < self->hold_count; i++) {
        Py_VISIT(self->holds[i].owner);
    }
    return 0;
}

/* The collector finalizes all objects of a cycle before it clears the first: this is the
 * last moment at which what the copies in flight read and write is surely there. */
static void stream_finalize(PyObject *object)
{
    shut((StreamObject *)object);
}

/* Unreachable, so nobody is inside a call; what is enqueued ends by itself. */
static int stream_clear(PyObject *object)
{
    shut((StreamObject *)object);
    return 0;
}

static void stream_dealloc(PyObject *object)
{
    StreamObject *self = (StreamObject *)object;

    PyObject_GC_UnTrack(object);
    shut(self);
    Py_XDECREF(self->labels);
    free(self->holds);
    wsync_py_free(object);
}

static int fail_range(ModuleState *state, const char *what, long long index, size_t count)
{
    (void)wsync_py_fail(state, WSYNC_ERR_INVALID, "Stream.copy",
                        "%s %lld is out of range (%zu in all)", what, index, count);
    return -1;
}

/* The copies of a plan's round and phase, or of a route's buffer or all of `buffer_count`:
 * those of the first owner. */
static int find_copies(ModuleState *state, batch_t *batch, size_t buffer_count)
{
    PyObject *object = batch->owners[0];

    if (Py_TYPE(object) == state->type_Plan) {
        const wsync_plan_t *plan = ((PlanObject *)object)->plan;
        const uint32_t rounds = wsync_plan_round_count(plan);

        batch->work.copies_id = ((PlanObject *)object)->id;
        if (batch->index < 0 || batch->index >= (long long)rounds) {
            return fail_range(state, "round", batch->index, rounds);
        }
        if (batch->phase < 0 || batch->phase >= WSYNC_PHASE_COUNT) {
            return fail_range(state, "phase", batch->phase, WSYNC_PHASE_COUNT);
        }
        batch->work.copies = wsync_plan_copies(
            plan, (uint32_t)batch->index, (wsync_phase_t)batch->phase, &batch->work.count);
        return 0;
    }
    if (Py_TYPE(object) == state->type_Route) {
        const wsync_route_t *route = ((RouteObject *)object)->route;
        const uint32_t buffers = wsync_route_buffer_count(route);

        batch->work.copies_id = ((RouteObject *)object)->id;
        if (batch->index == WSYNC_PY_ALL_BUFFERS) {
            batch->work.copies =
                wsync_route_copies_below(route, buffer_count, &batch->work.count);
            batch->index = 0; /* one round, to a trace */
            return 0;
        }
        if (batch->index < 0 || batch->index >= (long long)buffers) {
            return fail_range(state, "buffer", batch->index, buffers);
        }
        batch->work.copies =
            wsync_route_copies(route, (uint32_t)batch->index, &batch->work.count);
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "copies must be a Plan or a Route, not %R",
                 (PyObject *)Py_TYPE(object));
    return -1;
}

/* Batches without work are not noted, and so have no label. */
static int add_label(StreamObject *self, long long index, int phase, uint64_t nbytes)
{
    PyObject *label;
    int result;

    if (self->labels == NULL || nbytes == 0) {
        return 0;
    }
    label = Py_BuildValue("(Li)", index, phase);
    result = label != NULL ? PyList_Append(self->labels, label) : -1;
    Py_XDECREF(label);
    return result;
}

/* Keeps what a batch that was enqueued uses, until the stream has passed it. */
static void hold_all(StreamObject *self, PyObject *const owners[HOLDS])
{
    for (int i = 0; i < HOLDS; i++) {
        hold(self, owners[i]);
    }
    mark_batch(self);
}

int wsync_py_check_gpu(ModuleState *state, int gpu, const wsync_device_t *device,
                       const char *call)
{
    char text[WSYNC_DEVICE_TEXT_NBYTES];

    if (gpu < 0 || gpu == device->ordinal) {
        return 0;
    }
    (void)wsync_py_fail(state, WSYNC_ERR_INVALID, call,
                        "memory of GPU %d needs a stream on this GPU, not on %s", gpu,
                        wsync_device_text(device, text));
    return -1;
}

/* Returns the bytes that the batch writes, or NULL with an exception. */
static PyObject *enqueue_copies(ModuleState *state, StreamObject *self,
                                const batch_t *batch)
{
    wsync_stream_t *stream = enter(state, self);
    wsync_error_t err = {0};
    wsync_status_t status;
    uint64_t nbytes = 0;

    if (stream == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_stream_copy(stream, &batch->work, &err);
        if (status == WSYNC_OK) {
            nbytes = wsync_copies_nbytes(batch->work.copies, batch->work.count);
        }
    Py_END_ALLOW_THREADS
    if (status == WSYNC_OK) {
        hold_all(self, batch->owners);
    }
    leave(self);
    if (status != WSYNC_OK) {
        return wsync_py_raise(state, &err);
    }
    if (add_label(self, batch->index, batch->phase, nbytes) < 0) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(nbytes);
}

static PyObject *stream_copy(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"copies", "index", "phase", "sources", "destinations", NULL};
    ModuleState *state = wsync_py_state_of(object);
    const wsync_device_t *device = ((StreamObject *)object)->device;
    batch_t batch = {0};
    BufferTableObject *sources;
    BufferTableObject *destinations;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLiO!O!:copy", names, &batch.owners[0],
                                     &batch.index, &batch.phase, state->type_BufferTable,
                                     &sources, state->type_BufferTable, &destinations) ||
        wsync_py_check_gpu(state, sources->gpu, device, "Stream.copy") < 0 ||
        wsync_py_check_gpu(state, destinations->gpu, device, "Stream.copy") < 0 ||
        find_copies(state, &batch, sources->count) < 0) {
        return NULL;
    }
    batch.work.sources = sources->spans;
    batch.work.source_count = sources->count;
    batch.work.sources_id = sources->id;
    batch.work.sources_resident = sources->resident;
    batch.work.destinations = destinations->spans;
    batch.work.destination_count = destinations->count;
    batch.work.destinations_id = destinations->id;
    batch.work.destinations_resident = destinations->resident;
    batch.owners[1] = (PyObject *)sources;
    batch.owners[2] = (PyObject *)destinations;
    return enqueue_copies(state, (StreamObject *)object, &batch);
}

static PyObject *stream_quantise(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"quantiser", "sources", "results", "codes", NULL};
    StreamObject *self = (StreamObject *)object;
    ModuleState *state = wsync_py_state_of(object);
    PyObject *owners[HOLDS];
    wsync_quantise_batch_t batch = {0};
    const BufferTableObject *sources;
    const BufferTableObject *results;
    int codes;
    wsync_stream_t *stream;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!p:quantise", names,
                                     state->type_Quantiser, &owners[0],
                                     state->type_BufferTable, &owners[1],
                                     state->type_BufferTable, &owners[2], &codes)) {
        return NULL;
    }
    sources = (const BufferTableObject *)owners[1];
    results = (const BufferTableObject *)owners[2];
    if (wsync_py_check_gpu(state, sources->gpu, self->device, "Stream.quantise") < 0 ||
        wsync_py_check_gpu(state, results->gpu, self->device, "Stream.quantise") < 0) {
        return NULL;
    }
    if (results->count != 2) {
        return wsync_py_fail(state, WSYNC_ERR_INVALID, "Stream.quantise",
                             "expected 2 results, image and amaxes, not %zu",
                             results->count);
    }
    batch.pieces =
        wsync_quantiser_pieces(((QuantiserObject *)owners[0])->quantiser, &batch.count);
    batch.sources = sources->spans;
    batch.source_count = sources->count;
    batch.image = results->spans[0];
    batch.amaxes = results->spans[1];
    batch.pass = codes != 0 ? WSYNC_QUANTISE_CODES : WSYNC_QUANTISE_AMAXES;
    stream = enter(state, self);
    if (stream == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_stream_quantise(stream, &batch, &err);
    Py_END_ALLOW_THREADS
    if (status == WSYNC_OK) {
        hold_all(self, owners);
    }
    leave(self);
    return wsync_py_none(state, status, &err);
}

typedef wsync_status_t (*enqueue_func_t)(wsync_stream_t *, wsync_event_t, uint64_t,
                                         wsync_error_t *);

/* record and wait: `enqueue` is the device's, `format` that of the arguments. */
static PyObject *enqueue_event(PyObject *object, PyObject *args, PyObject *kwargs,
                               const char *format, enqueue_func_t enqueue)
{
    static char *names[] = {"event", "value", NULL};
    StreamObject *self = (StreamObject *)object;
    ModuleState *state = wsync_py_state_of(object);
    PyObject *event;
    uint64_t value;
    wsync_stream_t *stream;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, state->type_Event, &event,
                                     wsync_py_convert_u64, &value)) {
        return NULL;
    }
    stream = enter(state, self);
    if (stream == NULL) {
        return NULL;
    }
    /* a driver whose queue is full waits, and whoever ends that may need the lock */
    Py_BEGIN_ALLOW_THREADS
        status = enqueue(stream, ((EventObject *)event)->event, value, &err);
    Py_END_ALLOW_THREADS
    leave(self);
    return wsync_py_none(state, status, &err);
}

static PyObject *stream_record(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return enqueue_event(object, args, kwargs, "O!O&:record", wsync_stream_record);
}

static PyObject *stream_wait(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return enqueue_event(object, args, kwargs, "O!O&:wait", wsync_stream_wait);
}

static PyObject *stream_abandon(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout", NULL};
    StreamObject *self = (StreamObject *)object;
    double timeout = DRAIN_S;
    wsync_stream_t *stream;
    uint64_t mark;
    bool dry;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|d:abandon", names, &timeout)) {
        return NULL;
    }
    stream = enter(wsync_py_state_of(object), self);
    if (stream == NULL) {
        return NULL;
    }
    if (!(timeout <= DRAIN_S)) { /* nor a NaN */
        timeout = DRAIN_S;
    }
    /* Also of what waits for a mark that was not enqueued; what comes now has a later
     * one. */
    mark = ++self->mark;
    Py_BEGIN_ALLOW_THREADS
        dry = wsync_stream_abandon(stream, timeout > 0 ? (int)(timeout * 1000) : 0);
    Py_END_ALLOW_THREADS
    leave(self);
    if (dry) {
        drop_holds(self, mark); /* these marks are passed or will never be recorded */
    } else if (PyErr_WarnEx(
                   PyExc_RuntimeWarning,
                   "a GPU has not finished its work, so wsync keeps the weights and "
                   "buffers that the GPU may still use",
                   1) < 0) {
        return NULL;
    }
    return PyBool_FromLong(dry);
}

static PyObject *stream_look(PyObject *object, PyObject *Py_UNUSED(args))
{
    StreamObject *self = (StreamObject *)object;
    ModuleState *state = wsync_py_state_of(object);
    wsync_stream_t *stream = enter(state, self);
    wsync_error_t err = {0};
    wsync_status_t status;

    if (stream == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_stream_synchronize(stream, 0, &err);
    Py_END_ALLOW_THREADS
    leave(self);
    if (status != WSYNC_OK && status != WSYNC_ERR_TIMEOUT) {
        return wsync_py_raise(state, &err);
    }
    Py_RETURN_NONE;
}

static wsync_status_t synchronize_step(wsync_py_call_t *call, int timeout_ms,
                                       wsync_error_t *err)
{
    const StreamObject *self = call->core;

    return wsync_stream_synchronize(self->stream, timeout_ms, err);
}

static PyObject *stream_synchronize(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout", "check", NULL};
    StreamObject *self = (StreamObject *)object;
    ModuleState *state = wsync_py_state_of(object);
    wsync_py_call_t call = {.core = self};
    int result;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "d|O:synchronize", names, &call.timeout,
                                     &call.check) ||
        enter(state, self) == NULL) {
        return NULL;
    }
    if (self->hold_count > 0 && self->unmarked > 0) {
        enqueue_mark(self);
    }
    result = wsync_py_wait(state, synchronize_step, &call);
    leave(self);
    if (result < 0) {
        return NULL;
    }
    prune(self);
    Py_RETURN_NONE;
}

/* [(index, phase, begin, end)]; steals nothing. */
static PyObject *trace_list(PyObject *labels, const wsync_stream_span_t *spans,
                            size_t count)
{
    PyObject *list = PyList_New(0);
    const Py_ssize_t known = labels != NULL ? PyList_Size(labels) : 0;

    for (Py_ssize_t i = 0; list != NULL && i < known && (size_t)i < count; i++) {
        PyObject *label = PyList_GetItem(labels, i); /* borrowed */
        PyObject *item = Py_BuildValue(
            "(OOKK)", PyTuple_GetItem(label, 0), PyTuple_GetItem(label, 1),
            (unsigned long long)spans[i].begin, (unsigned long long)spans[i].end);

        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *stream_trace(PyObject *object, PyObject *args)
{
    StreamObject *self = (StreamObject *)object;
    ModuleState *state = wsync_py_state_of(object);
    wsync_stream_span_t *next = NULL;
    wsync_stream_span_t *spans = NULL;
    PyObject *labels = NULL;
    PyObject *list;
    unsigned capacity;
    size_t count = 0;

    if (!PyArg_ParseTuple(args, "I:trace", &capacity) || enter(state, self) == NULL) {
        return NULL;
    }
    if (capacity > 0) {
        next = calloc(capacity, sizeof(*next));
        labels = next != NULL ? PyList_New(0) : NULL;
        if (labels == NULL) {
            free(next);
            leave(self);
            return PyErr_Occurred() != NULL
                       ? NULL
                       : wsync_py_fail(state, WSYNC_ERR_NO_MEMORY, "Stream.trace",
                                       "no memory to note %u batches", capacity);
        }
    }
    Py_BEGIN_ALLOW_THREADS
        wsync_stream_trace(self->stream, next, capacity, &spans, &count);
    Py_END_ALLOW_THREADS
    leave(self);
    list = trace_list(self->labels, spans, count);
    free(spans);
    Py_XDECREF(self->labels);
    self->labels = labels;
    return list;
}

static PyObject *stream_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    StreamObject *self = (StreamObject *)object;

    if (self->users > 0) {
        return wsync_py_fail(wsync_py_state_of(object), WSYNC_ERR_STATE, "Stream.close",
                             "%u calls of other threads use the stream: join them before "
                             "close()",
                             self->users);
    }
    if (self->closing) { /* and needs what the stream holds until it is through */
        return wsync_py_fail(wsync_py_state_of(object), WSYNC_ERR_STATE, "Stream.close",
                             "another thread is closing the stream");
    }
    shut(self);
    Py_RETURN_NONE;
}

static PyMethodDef stream_methods[] = {
    {"copy", WSYNC_PY_KEYWORDS(stream_copy),
     "copy($self, copies, index, phase, sources, destinations)\n--\n\n"},
    {"quantise", WSYNC_PY_KEYWORDS(stream_quantise),
     "quantise($self, quantiser, sources, results, codes)\n--\n\n"},
    {"record", WSYNC_PY_KEYWORDS(stream_record), "record($self, event, value)\n--\n\n"},
    {"wait", WSYNC_PY_KEYWORDS(stream_wait), "wait($self, event, value)\n--\n\n"},
    {"abandon", WSYNC_PY_KEYWORDS(stream_abandon), "abandon($self, timeout=60.0)\n--\n\n"},
    {"look", stream_look, METH_NOARGS, "look($self, /)\n--\n\n"},
    {"synchronize", WSYNC_PY_KEYWORDS(stream_synchronize),
     "synchronize($self, timeout, check=None)\n--\n\n"},
    {"trace", stream_trace, METH_VARARGS, "trace($self, capacity, /)\n--\n\n"},
    {"close", stream_close, METH_NOARGS, "close($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyObject *stream_get_device(PyObject *object, void *Py_UNUSED(closure))
{
    return wsync_py_device_wrap(wsync_py_state_of(object),
                                ((StreamObject *)object)->device);
}

static PyGetSetDef stream_getset[] = {
    {"device", stream_get_device, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot stream_slots[] = {
    {Py_tp_doc, "Stream(threads=1, device=None)\n--\n\n"},
    {Py_tp_new, stream_new},
    {Py_tp_dealloc, stream_dealloc},
    {Py_tp_traverse, stream_traverse},
    {Py_tp_clear, stream_clear},
    {Py_tp_finalize, stream_finalize},
    {Py_tp_methods, stream_methods},
    {Py_tp_getset, stream_getset},
    {0, NULL},
};

static int add_max_threads(PyObject *module, PyTypeObject *Py_UNUSED(type))
{
    return PyModule_AddIntConstant(module, "MAX_THREADS", WSYNC_STREAM_MAX_THREADS);
}

const wsync_py_type_t wsync_py_type_Stream = {
    "wsync._core.Stream", sizeof(StreamObject), Py_TPFLAGS_HAVE_GC, stream_slots, NULL,
    add_max_threads};
