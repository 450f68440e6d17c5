/* SPDX-License-Identifier: Apache-2.0
 * Exchange: messages between the ranks of a plan. */
#include "comm/comm.h"
#include "comm/nccl_library.h"

#include <limits.h>
#include <stdlib.h>

#include "python/call.h"
#include "python/convert.h"
#include "python/device_types.h"
#include "python/plan.h"

/* close() only disconnects: the memory lives as long as the object, which every BufferTable
 * of spans keeps alive, so that streams may still run over them. */
typedef struct ExchangeObject {
    wsync_py_peer_t peer; /* core: wsync_comm_t */
    const char *name;
    const wsync_device_t *device; /* of the staging */
    PyObject *plan;               /* owned; the one that began last */
    uint32_t rank_count;
} ExchangeObject;

static void disconnect(wsync_py_peer_t *peer)
{
    Py_BEGIN_ALLOW_THREADS
        wsync_comm_close(peer->core);
    Py_END_ALLOW_THREADS
}

/* Takes the exchange, also on failure. */
static PyObject *wrap(ModuleState *state, const char *name, const wsync_device_t *device,
                      uint32_t ranks, wsync_comm_t *comm)
{
    ExchangeObject *self = (ExchangeObject *)wsync_py_alloc(state->type_Exchange);

    if (self == NULL) {
        wsync_comm_destroy(comm);
        return NULL;
    }
    self->name = name;
    self->peer.name = "Exchange";
    self->peer.release = disconnect;
    self->peer.core = comm;
    self->device = device;
    self->rank_count = ranks;
    return (PyObject *)self;
}

static PyObject *exchange_shared(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"rank",      "ranks",  "staging_nbytes",
                               "directory", "device", NULL};
    const char *directory = NULL;
    ModuleState *state = wsync_py_state(module);
    wsync_py_device_arg_t device = {state, wsync_device_host()};
    uint64_t staging_nbytes = 0;
    uint32_t rank = 0;
    uint32_t ranks = 0;
    wsync_comm_t *comm = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&|zO&:shared", keywords,
                                     wsync_py_convert_u32, &rank, wsync_py_convert_u32,
                                     &ranks, wsync_py_convert_u64, &staging_nbytes,
                                     &directory, wsync_py_convert_device, &device)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_comm_create_shared(device.device, directory, rank, ranks,
                                          staging_nbytes, &comm, &err);
    Py_END_ALLOW_THREADS
    return status == WSYNC_OK ? wrap(state, "shared", device.device, ranks, comm)
                              : wsync_py_raise(state, &err);
}

static PyObject *exchange_nccl(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"rank",    "ranks",  "send_nbytes", "recv_nbytes",
                               "timeout", "device", NULL};
    ModuleState *state = wsync_py_state(module);
    wsync_py_device_arg_t device = {state, wsync_device_host()};
    const wsync_nccl_library_t *library = NULL;
    uint64_t send_nbytes = 0;
    uint64_t recv_nbytes = 0;
    uint32_t rank = 0;
    uint32_t ranks = 0;
    double timeout = 0;
    wsync_comm_t *comm = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O&dO&:nccl", keywords,
                                     wsync_py_convert_u32, &rank, wsync_py_convert_u32,
                                     &ranks, wsync_py_convert_u64, &send_nbytes,
                                     wsync_py_convert_u64, &recv_nbytes, &timeout,
                                     wsync_py_convert_device, &device)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_nccl_library(NULL, 0, &library, &err);
        if (status == WSYNC_OK) {
            status = wsync_comm_create_nccl(
                library, device.device, rank, ranks, send_nbytes, recv_nbytes,
                timeout < INT_MAX / 1000 ? (int)(timeout * 1000) : INT_MAX, &comm, &err);
        }
    Py_END_ALLOW_THREADS
    return status == WSYNC_OK ? wrap(state, "nccl", device.device, ranks, comm)
                              : wsync_py_raise(state, &err);
}

static PyObject *exchange_nccl_address(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"device", NULL};
    ModuleState *state = wsync_py_state(module);
    wsync_py_device_arg_t device = {state, wsync_device_host()};
    const wsync_nccl_library_t *library = NULL;
    char address[WSYNC_COMM_ADDRESS_NBYTES];
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:nccl_address", keywords,
                                     wsync_py_convert_device, &device)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_nccl_library(NULL, 0, &library, &err);
        if (status == WSYNC_OK) {
            wsync_comm_nccl_address(library, device.device, address);
        }
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        return wsync_py_raise(state, &err);
    }
    return PyUnicode_FromString(address);
}

static void exchange_dealloc(PyObject *object)
{
    ExchangeObject *self = (ExchangeObject *)object;

    if (self->peer.core != NULL) {
        Py_BEGIN_ALLOW_THREADS
            wsync_comm_destroy(self->peer.core);
        Py_END_ALLOW_THREADS
    }
    Py_CLEAR(self->plan);
    wsync_py_free(object);
}

static PyObject *exchange_address(PyObject *object, void *Py_UNUSED(closure))
{
    return PyUnicode_DecodeFSDefault(wsync_comm_address(((wsync_py_peer_t *)object)->core));
}

static PyObject *exchange_name(PyObject *object, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(((ExchangeObject *)object)->name);
}

WSYNC_PY_NUMBER_GETTER(exchange_nbytes, wsync_comm_nbytes(((wsync_py_peer_t *)self)->core))

static wsync_status_t step_connect(wsync_py_call_t *call, int timeout_ms,
                                   wsync_error_t *err)
{
    return wsync_comm_connect(call->core, (const char *const *)call->made, timeout_ms, err);
}

static PyObject *exchange_connect(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"addresses", "timeout", "check", NULL};
    ExchangeObject *self = (ExchangeObject *)object;
    ModuleState *state = wsync_py_state_of(object);
    wsync_py_call_t call = {0};
    wsync_py_items_t addresses;
    PyObject *sequence = NULL;
    PyObject *result = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Od|O:connect", keywords, &sequence,
                                     &call.timeout, &call.check) ||
        wsync_py_items_init_texts(&addresses, state, sequence, "addresses") < 0) {
        return NULL;
    }
    if (addresses.count != self->rank_count) {
        (void)wsync_py_fail(state, WSYNC_ERR_INVALID, self->peer.name,
                            "connect: %zu addresses for %u ranks", addresses.count,
                            (unsigned)self->rank_count);
    } else {
        call.made = addresses.items;
        result = wsync_py_call_run(&self->peer, step_connect, NULL, &call);
    }
    wsync_py_items_fini(&addresses);
    return result;
}

static wsync_status_t step_begin(wsync_py_call_t *call, int Py_UNUSED(timeout_ms),
                                 wsync_error_t *err)
{
    return wsync_comm_begin(call->core, ((PlanObject *)call->plan)->plan, err);
}

static PyObject *keep_plan(PyObject *self, wsync_py_call_t *call)
{
    wsync_py_assign(&((ExchangeObject *)self)->plan, Py_NewRef(call->plan));
    Py_RETURN_NONE;
}

WSYNC_PY_CALL(exchange_begin, "begin", step_begin, keep_plan, WSYNC_PY_PLAN)

static wsync_status_t step_acquire(wsync_py_call_t *call, int timeout_ms,
                                   wsync_error_t *err)
{
    return wsync_comm_acquire(call->core, call->round, timeout_ms, err);
}

WSYNC_PY_CALL(exchange_acquire, "acquire", step_acquire, NULL, WSYNC_PY_ROUND,
              WSYNC_PY_TIMEOUT, WSYNC_PY_CHECK)

static wsync_status_t step_wait(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    return wsync_comm_wait(call->core, call->round, call->stream, timeout_ms, err);
}

WSYNC_PY_CALL(exchange_wait, "wait", step_wait, NULL, WSYNC_PY_ROUND,
              WSYNC_PY_ENQUEUE_STREAM, WSYNC_PY_TIMEOUT, WSYNC_PY_CHECK)

static PyObject *exchange_spans(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"round", NULL};
    ExchangeObject *self = (ExchangeObject *)object;
    ModuleState *state = wsync_py_state_of(object);
    const wsync_plan_t *plan = NULL;
    wsync_span_t *spans = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    PyObject *table = NULL;
    uint32_t round = 0;
    size_t count = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:spans", keywords,
                                     wsync_py_convert_u32, &round) ||
        wsync_py_peer_enter(&self->peer) < 0) {
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
    status = wsync_comm_spans(self->peer.core, round, spans, count, &err);
    table = status == WSYNC_OK
                ? wsync_py_buffers_create(state, self->device, spans, count, object)
                : wsync_py_raise(state, &err);

cleanup:
    free(spans);
    wsync_py_peer_leave(&self->peer);
    return table;
}

static wsync_status_t step_post(wsync_py_call_t *call, int Py_UNUSED(timeout_ms),
                                wsync_error_t *err)
{
    return wsync_comm_post(call->core, call->round, call->stream, err);
}

WSYNC_PY_CALL(exchange_post, "post", step_post, NULL, WSYNC_PY_ROUND,
              WSYNC_PY_ENQUEUE_STREAM)

static wsync_status_t step_release(wsync_py_call_t *call, int Py_UNUSED(timeout_ms),
                                   wsync_error_t *err)
{
    return wsync_comm_release(call->core, call->round, call->stream, err);
}

WSYNC_PY_CALL(exchange_release, "release", step_release, NULL, WSYNC_PY_ROUND,
              WSYNC_PY_ENQUEUE_STREAM)

static wsync_status_t step_check(wsync_py_call_t *call, int Py_UNUSED(timeout_ms),
                                 wsync_error_t *err)
{
    return wsync_comm_check(call->core, err);
}

WSYNC_PY_CALL(run_check, "check", step_check, NULL, WSYNC_PY_END)

/* A wait that is under way, perhaps the caller's own, says itself what has gone wrong. */
static PyObject *exchange_check(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return ((wsync_py_peer_t *)object)->busy ? Py_NewRef(Py_None)
                                             : run_check(object, NULL, 0, NULL);
}

static wsync_status_t step_park(wsync_py_call_t *call, int Py_UNUSED(timeout_ms),
                                wsync_error_t *err)
{
    return wsync_comm_park(call->core, err);
}

WSYNC_PY_CALL(exchange_park, "park", step_park, NULL, WSYNC_PY_END)

#define METHOD(name, text) {#name, WSYNC_PY_CALLED(exchange_##name), text}

static PyMethodDef exchange_methods[] = {
    {"connect", WSYNC_PY_KEYWORDS(exchange_connect),
     "connect($self, addresses, timeout, check=None)\n--\n\n"},
    METHOD(begin, "begin($self, plan)\n--\n\n"),
    METHOD(acquire, "acquire($self, round, timeout, check=None)\n--\n\n"),
    {"spans", WSYNC_PY_KEYWORDS(exchange_spans), "spans($self, round)\n--\n\n"},
    METHOD(post, "post($self, round, stream)\n--\n\n"),
    METHOD(wait, "wait($self, round, stream, timeout, check=None)\n--\n\n"),
    METHOD(release, "release($self, round, stream)\n--\n\n"),
    {"check", exchange_check, METH_NOARGS, "check($self)\n--\n\n"},
    METHOD(park, "park($self)\n--\n\n"),
    {"close", wsync_py_peer_close, METH_NOARGS, "close($self)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef exchange_getset[] = {
    {"name", exchange_name, NULL, NULL, NULL},
    {"address", exchange_address, NULL, NULL, NULL},
    {"nbytes", exchange_nbytes, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef exchange_static_methods[] = {
    {"shared", WSYNC_PY_KEYWORDS(exchange_shared),
     "shared(rank, ranks, staging_nbytes, directory=None, device=None)\n--\n\n"},
    {"nccl", WSYNC_PY_KEYWORDS(exchange_nccl),
     "nccl(rank, ranks, send_nbytes, recv_nbytes, timeout, device)\n--\n\n"},
    {"nccl_address", WSYNC_PY_KEYWORDS(exchange_nccl_address),
     "nccl_address(device)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot exchange_slots[] = {
    {Py_tp_dealloc, exchange_dealloc},
    {Py_tp_methods, exchange_methods},
    {Py_tp_getset, exchange_getset},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_Exchange = {
    "wsync._core.Exchange", sizeof(ExchangeObject),  Py_TPFLAGS_DISALLOW_INSTANTIATION,
    exchange_slots,         exchange_static_methods, NULL};
