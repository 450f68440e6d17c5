/* SPDX-License-Identifier: Apache-2.0
 * SharedExchange: messages between the trainer ranks of one host. */
#include "comm/comm.h"

#include <stdlib.h>

#include "ipc/channel.h"
#include "python/convert.h"
#include "python/device.h"
#include "python/guard.h"
#include "python/plan.h"

/* close() only disconnects: the memory lives as long as the object, which every BufferTable
 * of spans keeps alive, so that streams may still run over them. */
typedef struct ExchangeObject {
    PyObject_HEAD
    const wsync_device_t *device; /* of the staging */
    wsync_comm_t *comm;           /* owned */
    PyObject *plan;               /* owned; the one that began last */
    uint32_t rank_count;
    wsync_py_guard_t guard;
} ExchangeObject;

/* One call's arguments, for a step without the GIL. */
typedef struct exchange_call {
    wsync_comm_t *comm;
    const wsync_plan_t *plan;
    const char **addresses;
    wsync_stream_t *stream;
    uint32_t round;
} exchange_call_t;

static const char exchange_name[] = "SharedExchange";

static int exchange_wait(ExchangeObject *self, wsync_py_step_func_t step,
                         exchange_call_t *call, double timeout, PyObject *check)
{
    call->comm = self->comm;
    return wsync_py_guarded_wait(wsync_py_type_state(Py_TYPE((PyObject *)self)),
                                 &self->guard, exchange_name, step, call, timeout, check);
}

static PyObject *exchange_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"rank",      "ranks",  "staging_nbytes",
                               "directory", "device", NULL};
    const char *directory = NULL;
    wsync_py_device_arg_t device = {wsync_py_type_state(type), wsync_device_host()};
    uint64_t staging_nbytes = 0;
    uint32_t rank = 0;
    uint32_t ranks = 0;
    wsync_comm_t *comm = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    ExchangeObject *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&|zO&:SharedExchange", keywords,
                                     wsync_py_convert_u32, &rank, wsync_py_convert_u32,
                                     &ranks, wsync_py_convert_u64, &staging_nbytes,
                                     &directory, wsync_py_convert_device, &device)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_comm_create(device.device, directory, rank, ranks, staging_nbytes,
                                   &comm, &err);
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        return wsync_py_raise(wsync_py_type_state(type), &err);
    }
    self = (ExchangeObject *)wsync_py_alloc(type);
    if (self == NULL) {
        wsync_comm_destroy(comm);
        return NULL;
    }
    self->device = device.device;
    self->comm = comm;
    self->rank_count = ranks;
    return (PyObject *)self;
}

static void exchange_dealloc(PyObject *object)
{
    ExchangeObject *self = (ExchangeObject *)object;

    if (self->comm != NULL) {
        Py_BEGIN_ALLOW_THREADS
            wsync_comm_destroy(self->comm);
        Py_END_ALLOW_THREADS
    }
    Py_CLEAR(self->plan);
    wsync_py_free(object);
}

static PyObject *exchange_address(PyObject *object, void *closure)
{
    (void)closure;
    return PyUnicode_DecodeFSDefault(wsync_comm_address(((ExchangeObject *)object)->comm));
}

static PyObject *exchange_nbytes(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(wsync_comm_nbytes(((ExchangeObject *)object)->comm));
}

static wsync_status_t step_connect(void *context, int timeout_ms, wsync_error_t *err)
{
    exchange_call_t *call = context;

    return wsync_comm_connect(call->comm, call->addresses, timeout_ms, err);
}

/* Borrows the texts of a tuple; NULL with an exception set. */
static const char **read_addresses(const ExchangeObject *self, PyObject *tuple)
{
    ModuleState *state = wsync_py_type_state(Py_TYPE((PyObject *)self));
    const Py_ssize_t count = PyTuple_Size(tuple);
    const char **addresses;

    if (count != (Py_ssize_t)self->rank_count) {
        return wsync_py_fail(state, WSYNC_ERR_INVALID, exchange_name,
                             "connect: %zd addresses for %u ranks", count,
                             (unsigned)self->rank_count);
    }
    addresses = (const char **)calloc((size_t)count, sizeof(*addresses));
    if (addresses == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        addresses[i] = wsync_py_read_text(state, PyTuple_GetItem(tuple, i), "address");
        if (addresses[i] == NULL) {
            free((void *)addresses);
            return NULL;
        }
    }
    return addresses;
}

static PyObject *exchange_connect(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"addresses", "timeout", "check", NULL};
    ExchangeObject *self = (ExchangeObject *)object;
    exchange_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;
    PyObject *sequence = NULL;
    PyObject *tuple = NULL;
    int result = -1;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Od|O:connect", keywords, &sequence,
                                     &timeout, &check)) {
        return NULL;
    }
    tuple = PySequence_Tuple(sequence);
    if (tuple == NULL) {
        return NULL;
    }
    call.addresses = read_addresses(self, tuple);
    if (call.addresses != NULL) {
        result = exchange_wait(self, step_connect, &call, timeout, check);
    }
    free((void *)call.addresses);
    Py_DECREF(tuple);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static wsync_status_t step_begin(void *context, int timeout_ms, wsync_error_t *err)
{
    exchange_call_t *call = context;

    (void)timeout_ms;
    return wsync_comm_begin(call->comm, call->plan, err);
}

static PyObject *exchange_begin(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"plan", NULL};
    ExchangeObject *self = (ExchangeObject *)object;
    ModuleState *state = wsync_py_type_state(Py_TYPE(object));
    exchange_call_t call = {0};
    PyObject *plan = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:begin", keywords, state->type_Plan,
                                     &plan)) {
        return NULL;
    }
    call.plan = ((PlanObject *)plan)->plan;
    if (exchange_wait(self, step_begin, &call, 0.0, NULL) < 0) {
        return NULL;
    }
    wsync_py_assign(&self->plan, Py_NewRef(plan));
    Py_RETURN_NONE;
}

static wsync_status_t step_acquire(void *context, int timeout_ms, wsync_error_t *err)
{
    exchange_call_t *call = context;

    return wsync_comm_acquire(call->comm, call->round, timeout_ms, err);
}

static PyObject *exchange_acquire(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"round", "timeout", "check", NULL};
    exchange_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&d|O:acquire", keywords,
                                     wsync_py_convert_u32, &call.round, &timeout, &check) ||
        exchange_wait((ExchangeObject *)object, step_acquire, &call, timeout, check) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static wsync_status_t step_wait(void *context, int timeout_ms, wsync_error_t *err)
{
    exchange_call_t *call = context;

    return wsync_comm_wait(call->comm, call->round, timeout_ms, err);
}

static PyObject *exchange_wait_round(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"round", "timeout", "check", NULL};
    exchange_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&d|O:wait", keywords,
                                     wsync_py_convert_u32, &call.round, &timeout, &check) ||
        exchange_wait((ExchangeObject *)object, step_wait, &call, timeout, check) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *exchange_spans(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"round", NULL};
    ExchangeObject *self = (ExchangeObject *)object;
    ModuleState *state = wsync_py_type_state(Py_TYPE(object));
    const wsync_plan_t *plan = NULL;
    wsync_span_t *spans = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    PyObject *table = NULL;
    uint32_t round = 0;
    size_t count = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:spans", keywords,
                                     wsync_py_convert_u32, &round) ||
        wsync_py_guard_enter(state, &self->guard, exchange_name) < 0) {
        return NULL;
    }
    plan = self->plan != NULL ? ((PlanObject *)self->plan)->plan : NULL;
    if (plan != NULL && round < wsync_plan_round_count(plan)) {
        (void)wsync_plan_messages(plan, round, &count);
    }
    spans = calloc(count > 0 ? count : 1, sizeof(*spans));
    if (spans == NULL) {
        (void)PyErr_NoMemory();
        goto cleanup;
    }
    status = wsync_comm_spans(self->comm, round, spans, count, &err);
    table = status == WSYNC_OK
                ? wsync_py_buffers_create(state, self->device, spans, count, object)
                : wsync_py_raise(state, &err);

cleanup:
    free(spans);
    wsync_py_guard_leave(&self->guard);
    return table;
}

static wsync_status_t step_post(void *context, int timeout_ms, wsync_error_t *err)
{
    exchange_call_t *call = context;

    (void)timeout_ms;
    return wsync_comm_post(call->comm, call->round, call->stream, err);
}

static wsync_status_t step_release(void *context, int timeout_ms, wsync_error_t *err)
{
    exchange_call_t *call = context;

    (void)timeout_ms;
    return wsync_comm_release(call->comm, call->round, call->stream, err);
}

/* post and release: something about a round, when a stream gets here. */
static PyObject *enqueue(PyObject *object, PyObject *args, PyObject *kwargs,
                         const char *format, wsync_py_step_func_t step)
{
    static char *keywords[] = {"round", "stream", NULL};
    ModuleState *state = wsync_py_type_state(Py_TYPE(object));
    exchange_call_t call = {0};
    PyObject *stream = NULL;
    int result;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, keywords, wsync_py_convert_u32,
                                     &call.round, state->type_Stream, &stream)) {
        return NULL;
    }
    call.stream = wsync_py_stream_enter(state, (StreamObject *)stream);
    if (call.stream == NULL) {
        return NULL;
    }
    result = exchange_wait((ExchangeObject *)object, step, &call, 0.0, NULL);
    wsync_py_stream_leave((StreamObject *)stream);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *exchange_post(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return enqueue(object, args, kwargs, "O&O!:post", step_post);
}

static PyObject *exchange_release(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return enqueue(object, args, kwargs, "O&O!:release", step_release);
}

static PyObject *exchange_close(PyObject *object, PyObject *unused)
{
    ExchangeObject *self = (ExchangeObject *)object;

    (void)unused;
    if (!self->guard.closed) {
        if (wsync_py_guard_enter(wsync_py_type_state(Py_TYPE(object)), &self->guard,
                                 exchange_name) < 0) {
            return NULL;
        }
        self->guard.closed = true;
        Py_BEGIN_ALLOW_THREADS
            wsync_comm_close(self->comm);
        Py_END_ALLOW_THREADS
        wsync_py_guard_leave(&self->guard);
    }
    Py_RETURN_NONE;
}

#define METHOD(name, function, text) \
    {name, (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS, text}

static PyMethodDef exchange_methods[] = {
    METHOD("connect", exchange_connect,
           "connect($self, addresses, timeout, check=None)\n--\n\n"
           "Meets the other ranks; addresses[i] is rank i's address."),
    METHOD("begin", exchange_begin, "begin($self, plan)\n--\n\nStarts an update."),
    METHOD("acquire", exchange_acquire,
           "acquire($self, round, timeout, check=None)\n--\n\n"
           "Waits until the send staging of a round may be written."),
    METHOD("spans", exchange_spans,
           "spans($self, round)\n--\n\n"
           "Where the messages of a round are packed to and unpacked from."),
    METHOD("post", exchange_post,
           "post($self, round, stream)\n--\n\n"
           "What was packed is on its way when the stream gets here."),
    METHOD("wait", exchange_wait_round,
           "wait($self, round, timeout, check=None)\n--\n\n"
           "Waits until what the others sent can be read."),
    METHOD(
        "release", exchange_release,
        "release($self, round, stream)\n--\n\nIt has been read when the stream gets here."),
    {"close", exchange_close, METH_NOARGS,
     "close($self)\n--\n\n"
     "Leaves; the others see an end in the middle of an update as PeerClosedError."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef exchange_getset[] = {
    {"address", exchange_address, NULL, "Text to hand to all ranks.", NULL},
    {"nbytes", exchange_nbytes, NULL, "Bytes of this rank's own staging, both halves.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot exchange_slots[] = {
    {Py_tp_doc,
     "SharedExchange(rank, ranks, staging_nbytes, directory=None, device=None)\n--\n\n"
     "Ranks of one host read each other's send staging."},
    {Py_tp_new, exchange_new},
    {Py_tp_dealloc, exchange_dealloc},
    {Py_tp_methods, exchange_methods},
    {Py_tp_getset, exchange_getset},
    {0, NULL},
};

static int add_name(PyObject *Py_UNUSED(module), PyTypeObject *type)
{
    PyObject *name = PyUnicode_FromString("shared");
    const int result =
        name != NULL ? PyObject_SetAttrString((PyObject *)type, "name", name) : -1;

    Py_XDECREF(name);
    return result;
}

const wsync_py_type_t wsync_py_type_SharedExchange = {"wsync._core.SharedExchange",
                                                      sizeof(ExchangeObject),
                                                      0,
                                                      exchange_slots,
                                                      NULL,
                                                      add_name};
