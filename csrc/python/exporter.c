/* SPDX-License-Identifier: Apache-2.0
 * The trainer's half of a session. */
#include "ipc/session.h"

#include <stdlib.h>

#include "python/call.h"
#include "python/convert.h"
#include "python/device_types.h"

typedef struct ExporterObject {
    wsync_py_peer_t peer; /* core: wsync_exporter_t */
    PyObject *ring;       /* owned; the Memory that is attached */
    char address[WSYNC_ADDRESS_NBYTES];
} ExporterObject;

static void exporter_release(wsync_py_peer_t *peer)
{
    wsync_exporter_t *exporter = peer->core;

    peer->core = NULL;
    Py_BEGIN_ALLOW_THREADS
        wsync_exporter_destroy(exporter);
    Py_END_ALLOW_THREADS
    Py_CLEAR(((ExporterObject *)peer)->ring);
}

static PyObject *exporter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"directory", NULL};
    const char *directory = NULL;
    wsync_exporter_t *exporter = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    ExporterObject *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|z:Exporter", keywords, &directory)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_exporter_create(directory, &exporter, &err);
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        return wsync_py_raise(wsync_py_type_state(type), &err);
    }
    self = (ExporterObject *)wsync_py_alloc(type);
    if (self == NULL) {
        wsync_exporter_destroy(exporter);
        return NULL;
    }
    self->peer.name = "Exporter";
    self->peer.release = exporter_release;
    self->peer.core = exporter;
    wsync_address_format(wsync_exporter_token(exporter), wsync_exporter_path(exporter),
                         self->address);
    return (PyObject *)self;
}

static void exporter_dealloc(PyObject *object)
{
    exporter_release((wsync_py_peer_t *)object);
    wsync_py_free(object);
}

static PyObject *exporter_address(PyObject *object, void *Py_UNUSED(closure))
{
    return PyUnicode_DecodeFSDefault(((ExporterObject *)object)->address);
}

static PyObject *exporter_worker_uuid(PyObject *object, void *Py_UNUSED(closure))
{
    wsync_py_peer_t *peer = (wsync_py_peer_t *)object;
    char text[WSYNC_PY_UUID_NBYTES];

    if (wsync_py_peer_enter(peer) < 0) {
        return NULL;
    }
    wsync_py_uuid_format(wsync_exporter_worker_uuid(peer->core), text);
    wsync_py_peer_leave(peer);
    return PyUnicode_FromString(text);
}

static PyObject *exporter_loaded(PyObject *object, void *Py_UNUSED(closure))
{
    wsync_py_peer_t *peer = (wsync_py_peer_t *)object;
    uint32_t rounds;

    if (wsync_py_peer_enter(peer) < 0) {
        return NULL;
    }
    rounds = wsync_exporter_loaded(peer->core);
    wsync_py_peer_leave(peer);
    return PyLong_FromUnsignedLong(rounds);
}

static wsync_status_t step_accept(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    uint8_t *blob = NULL;
    const wsync_status_t status =
        wsync_exporter_accept(call->core, timeout_ms, &blob, &call->nbytes, err);

    call->made = blob;
    return status;
}

static PyObject *give_blob(PyObject *Py_UNUSED(self), wsync_py_call_t *call)
{
    PyObject *blob = PyBytes_FromStringAndSize(call->made, (Py_ssize_t)call->nbytes);

    free(call->made);
    return blob;
}

WSYNC_PY_CALL(exporter_accept, "accept", step_accept, give_blob, WSYNC_PY_TIMEOUT,
              WSYNC_PY_CHECK)

static wsync_status_t step_attach(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    const MemoryObject *ring = (MemoryObject *)call->ring;

    return wsync_exporter_attach(call->core, ring->memory, call->manifest.buf,
                                 (size_t)call->manifest.len, timeout_ms, err);
}

static PyObject *keep_ring(PyObject *self, wsync_py_call_t *call)
{
    wsync_py_assign(&((ExporterObject *)self)->ring, Py_NewRef(call->ring));
    Py_RETURN_NONE;
}

WSYNC_PY_CALL(exporter_attach, "attach", step_attach, keep_ring, WSYNC_PY_RING,
              WSYNC_PY_MANIFEST, WSYNC_PY_TIMEOUT, WSYNC_PY_CHECK)

static wsync_status_t step_lend(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    const MemoryObject *lent = (MemoryObject *)call->memory;

    return wsync_exporter_lend(call->core, lent->memory, timeout_ms, &call->value, err);
}

static PyObject *give_segment(PyObject *Py_UNUSED(self), wsync_py_call_t *call)
{
    return PyLong_FromUnsignedLongLong(call->value);
}

WSYNC_PY_CALL(exporter_lend, "lend", step_lend, give_segment, WSYNC_PY_MEMORY,
              WSYNC_PY_TIMEOUT, WSYNC_PY_CHECK)

/* Only copied: the address need not be aligned. */
static wsync_status_t step_bind(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    return wsync_exporter_bind(call->core, call->manifest.buf,
                               (size_t)call->manifest.len / sizeof(wsync_binding_t),
                               timeout_ms, err);
}

WSYNC_PY_CALL(exporter_bind, "bind", step_bind, NULL, WSYNC_PY_BINDINGS, WSYNC_PY_TIMEOUT,
              WSYNC_PY_CHECK)

static wsync_status_t step_begin(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    return wsync_exporter_begin(call->core, call->update, call->rounds, timeout_ms, err);
}

WSYNC_PY_CALL(exporter_begin, "begin", step_begin, NULL, WSYNC_PY_UPDATE, WSYNC_PY_ROUNDS,
              WSYNC_PY_TIMEOUT, WSYNC_PY_CHECK)

static wsync_status_t step_begun(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    return wsync_exporter_begun(call->core, timeout_ms, err);
}

WSYNC_PY_CALL(exporter_begun, "begun", step_begun, NULL, WSYNC_PY_TIMEOUT, WSYNC_PY_CHECK)

static wsync_status_t step_acquire(wsync_py_call_t *call, int timeout_ms,
                                   wsync_error_t *err)
{
    return wsync_exporter_acquire(call->core, call->wait_round, call->stream, timeout_ms,
                                  err);
}

WSYNC_PY_CALL(exporter_acquire, "acquire", step_acquire, NULL, WSYNC_PY_WAIT_ROUND,
              WSYNC_PY_STREAM, WSYNC_PY_TIMEOUT, WSYNC_PY_CHECK)

static PyObject *exporter_look(PyObject *object, PyObject *Py_UNUSED(unused))
{
    wsync_py_peer_t *peer = (wsync_py_peer_t *)object;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!peer->closed && peer->busy) {
        Py_RETURN_NONE; /* below a wait of its own, which looks as well */
    }
    if (wsync_py_peer_enter(peer) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_exporter_look(peer->core, &err);
    Py_END_ALLOW_THREADS
    wsync_py_peer_leave(peer);
    return wsync_py_none(wsync_py_state_of(object), status, &err);
}

static wsync_status_t step_post(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    return wsync_exporter_post(call->core, call->round, call->stream, timeout_ms, err);
}

WSYNC_PY_CALL(exporter_post, "post", step_post, NULL, WSYNC_PY_ROUND,
              WSYNC_PY_ENQUEUE_STREAM, WSYNC_PY_TIMEOUT, WSYNC_PY_CHECK)

static wsync_status_t step_prepared(wsync_py_call_t *call, int timeout_ms,
                                    wsync_error_t *err)
{
    return wsync_exporter_prepared(call->core, timeout_ms, &call->receipt, err);
}

static PyObject *give_receipt(PyObject *Py_UNUSED(self), wsync_py_call_t *call)
{
    return Py_BuildValue("KKK", (unsigned long long)call->receipt.tensor_count,
                         (unsigned long long)call->receipt.nbytes,
                         (unsigned long long)call->receipt.audit_ns);
}

WSYNC_PY_CALL(exporter_prepared, "prepared", step_prepared, give_receipt, WSYNC_PY_TIMEOUT,
              WSYNC_PY_CHECK)

static wsync_status_t step_commit(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    return wsync_exporter_commit(call->core, call->park != 0, timeout_ms, err);
}

WSYNC_PY_CALL(exporter_commit, "commit", step_commit, NULL, WSYNC_PY_TIMEOUT,
              WSYNC_PY_CHECK, WSYNC_PY_PARK)

static wsync_status_t step_park(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    return wsync_exporter_park(call->core, timeout_ms, err);
}

WSYNC_PY_CALL(exporter_park, "park", step_park, NULL, WSYNC_PY_TIMEOUT, WSYNC_PY_CHECK)

static wsync_status_t step_abort(wsync_py_call_t *call, int Py_UNUSED(timeout_ms),
                                 wsync_error_t *Py_UNUSED(err))
{
    wsync_exporter_abort(call->core, call->text);
    return WSYNC_OK;
}

WSYNC_PY_CALL_IF_OPEN(exporter_abort, "abort", step_abort, NULL, WSYNC_PY_TEXT)

#define METHOD(name, text) {#name, WSYNC_PY_CALLED(exporter_##name), text}

static PyMethodDef exporter_methods[] = {
    METHOD(accept, "accept($self, timeout, check=None)\n--\n\n"),
    METHOD(attach, "attach($self, ring, manifest, timeout, check=None)\n--\n\n"),
    METHOD(lend, "lend($self, memory, timeout, check=None)\n--\n\n"),
    METHOD(bind, "bind($self, bindings, timeout, check=None)\n--\n\n"),
    METHOD(begin, "begin($self, update, rounds, timeout, check=None)\n--\n\n"),
    METHOD(begun, "begun($self, timeout, check=None)\n--\n\n"),
    METHOD(acquire, "acquire($self, wait_round, stream, timeout, check=None)\n--\n\n"),
    {"look", exporter_look, METH_NOARGS, "look($self)\n--\n\n"},
    METHOD(post, "post($self, round, stream, timeout, check=None)\n--\n\n"),
    METHOD(prepared, "prepared($self, timeout, check=None)\n--\n\n"),
    METHOD(commit, "commit($self, timeout, check=None, park=False)\n--\n\n"),
    METHOD(park, "park($self, timeout, check=None)\n--\n\n"),
    METHOD(abort, "abort($self, text)\n--\n\n"),
    {"close", wsync_py_peer_close, METH_NOARGS, "close($self)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef exporter_getset[] = {
    {"address", exporter_address, NULL, NULL, NULL},
    {"worker_uuid", exporter_worker_uuid, NULL, NULL, NULL},
    {"loaded", exporter_loaded, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot exporter_slots[] = {
    {Py_tp_doc, "Exporter(directory=None)\n--\n\n"},
    {Py_tp_new, exporter_new},
    {Py_tp_dealloc, exporter_dealloc},
    {Py_tp_methods, exporter_methods},
    {Py_tp_getset, exporter_getset},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_Exporter = {
    "wsync._core.Exporter", sizeof(ExporterObject), 0, exporter_slots, NULL, NULL};
