/* SPDX-License-Identifier: Apache-2.0
 * The worker's half of a session. */
#include <stdlib.h>

#include "python/call.h"
#include "python/convert.h"
#include "python/device_types.h"

typedef struct ImporterObject {
    wsync_py_peer_t peer; /* core: wsync_importer_t */
    PyObject *ring;       /* owned Memory; shares the importer's ring and outlives it */
    PyObject *manifest;   /* owned bytes */
    uint64_t generation;  /* of ring and manifest */
    PyObject *bound;      /* owned BufferTable, or NULL */
    uint64_t bound_generation;
} ImporterObject;

/* Where a worker connects to, and what it says of itself. */
typedef struct connection {
    const wsync_device_t *device;
    uint8_t token[WSYNC_TOKEN_NBYTES];
    char path[WSYNC_PATH_NBYTES];
    Py_buffer blob;
} connection_t;

static wsync_status_t step_create(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    const connection_t *to = call->data;
    wsync_importer_t *importer = NULL;
    const wsync_status_t status =
        wsync_importer_create(to->device, to->path, to->token, to->blob.buf,
                              (size_t)to->blob.len, timeout_ms, &importer, err);

    call->made = importer;
    return status;
}

static void importer_release(wsync_py_peer_t *peer)
{
    wsync_importer_t *importer = peer->core;

    peer->core = NULL;
    Py_BEGIN_ALLOW_THREADS
        wsync_importer_destroy(importer);
    Py_END_ALLOW_THREADS
}

static PyObject *importer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"address", "blob", "timeout", "device", NULL};
    ModuleState *state = wsync_py_type_state(type);
    wsync_py_device_arg_t device = {state, wsync_device_host()};
    const char *address = NULL;
    connection_t to = {0};
    wsync_py_call_t call = {.data = &to};
    wsync_error_t err = {0};
    ImporterObject *self = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sy*d|O&:Importer", keywords, &address,
                                     &to.blob, &call.timeout, wsync_py_convert_device,
                                     &device)) {
        return NULL;
    }
    to.device = device.device;
    if (wsync_address_parse(address, to.token, to.path, &err) != WSYNC_OK) {
        (void)wsync_py_raise(state, &err);
    } else if (wsync_py_wait(state, step_create, &call) == 0) {
        self = (ImporterObject *)wsync_py_alloc(type);
        if (self == NULL) {
            wsync_importer_destroy(call.made);
        } else {
            self->peer.name = "Importer";
            self->peer.release = importer_release;
            self->peer.core = call.made;
        }
    }
    PyBuffer_Release(&to.blob);
    return (PyObject *)self;
}

static void importer_dealloc(PyObject *object)
{
    ImporterObject *self = (ImporterObject *)object;

    importer_release(&self->peer);
    Py_CLEAR(self->ring);
    Py_CLEAR(self->manifest);
    Py_CLEAR(self->bound);
    wsync_py_free(object);
}

/* Makes the Python objects of a new attach; the old ones live on in whoever holds them. */
static int refresh(ImporterObject *self)
{
    const uint64_t generation = wsync_importer_generation(self->peer.core);
    wsync_memory_t *memory = wsync_importer_ring(self->peer.core);
    size_t nbytes = 0;
    const uint8_t *data = wsync_importer_manifest(self->peer.core, &nbytes);
    PyObject *manifest;
    PyObject *ring;

    if (generation == self->generation) {
        return 0;
    }
    manifest = PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)nbytes);
    if (manifest == NULL) {
        return -1;
    }
    wsync_memory_retain(memory);
    ring = wsync_py_memory_wrap(wsync_py_state_of((PyObject *)self), memory);
    if (ring == NULL) {
        Py_DECREF(manifest);
        return -1;
    }
    wsync_py_assign(&self->ring, ring);
    wsync_py_assign(&self->manifest, manifest);
    self->generation = generation;
    return 0;
}

/* The segments that are lent, as a new tuple of Memory. */
static PyObject *wrap_segments(ImporterObject *self)
{
    ModuleState *state = wsync_py_state_of((PyObject *)self);
    size_t count = 0;
    wsync_memory_t *const *segments = wsync_importer_segments(self->peer.core, &count);
    PyObject *wrapped = PyTuple_New((Py_ssize_t)count);

    for (size_t i = 0; wrapped != NULL && i < count; i++) {
        PyObject *memory;

        wsync_memory_retain(segments[i]);
        memory = wsync_py_memory_wrap(state, segments[i]);
        if (memory == NULL || PyTuple_SetItem(wrapped, (Py_ssize_t)i, memory) < 0) {
            Py_CLEAR(wrapped);
        }
    }
    return wrapped;
}

/* Makes the table of what is bound, if that has changed. */
static int refresh_bound(ImporterObject *self)
{
    size_t count = 0;
    uint64_t generation = 0;
    const wsync_span_t *spans = wsync_importer_bound(self->peer.core, &count, &generation);
    PyObject *table = NULL;

    if (generation == self->bound_generation) {
        return 0;
    }
    if (spans != NULL) {
        PyObject *segments = wrap_segments(self);

        if (segments != NULL) {
            const wsync_memory_t *ring = wsync_importer_ring(self->peer.core);

            table = wsync_py_buffers_create(wsync_py_state_of((PyObject *)self),
                                            ring->device, spans, count, segments);
            Py_DECREF(segments);
        }
        if (table == NULL) {
            return -1;
        }
    }
    wsync_py_assign(&self->bound, table);
    self->bound_generation = generation;
    return 0;
}

static wsync_status_t step_begin(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    return wsync_importer_begin(call->core, timeout_ms, &call->update, &call->rounds, err);
}

static PyObject *give_update(PyObject *self, wsync_py_call_t *call)
{
    if (refresh((ImporterObject *)self) < 0 || refresh_bound((ImporterObject *)self) < 0) {
        return NULL;
    }
    return Py_BuildValue("KI", (unsigned long long)call->update,
                         (unsigned int)call->rounds);
}

WSYNC_PY_CALL(importer_begin, "begin", step_begin, give_update, WSYNC_PY_TIMEOUT,
              WSYNC_PY_CHECK)

static wsync_status_t step_take(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    return wsync_importer_take(call->core, call->round, call->stream, timeout_ms, err);
}

WSYNC_PY_CALL(importer_take, "take", step_take, NULL, WSYNC_PY_ROUND, WSYNC_PY_STREAM,
              WSYNC_PY_TIMEOUT, WSYNC_PY_CHECK)

static wsync_status_t step_wait(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    return wsync_importer_wait(call->core, call->round, timeout_ms, err);
}

WSYNC_PY_CALL(importer_wait, "wait", step_wait, NULL, WSYNC_PY_ROUND, WSYNC_PY_TIMEOUT,
              WSYNC_PY_CHECK)

static wsync_status_t step_done(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    return wsync_importer_done(call->core, call->round, call->stream, timeout_ms, err);
}

WSYNC_PY_CALL(importer_done, "done", step_done, NULL, WSYNC_PY_ROUND, WSYNC_PY_STREAM,
              WSYNC_PY_TIMEOUT, WSYNC_PY_CHECK)

static wsync_status_t step_prepared(wsync_py_call_t *call, int timeout_ms,
                                    wsync_error_t *err)
{
    return wsync_importer_prepared(call->core, &call->receipt, timeout_ms, err);
}

WSYNC_PY_CALL(importer_prepared, "prepared", step_prepared, NULL, WSYNC_PY_TENSORS,
              WSYNC_PY_NBYTES, WSYNC_PY_AUDIT_NS, WSYNC_PY_TIMEOUT, WSYNC_PY_CHECK)

static wsync_status_t step_verdict(wsync_py_call_t *call, int timeout_ms,
                                   wsync_error_t *err)
{
    return wsync_importer_verdict(call->core, timeout_ms, err);
}

WSYNC_PY_CALL(importer_verdict, "verdict", step_verdict, NULL, WSYNC_PY_TIMEOUT,
              WSYNC_PY_CHECK)

static wsync_status_t step_fail(wsync_py_call_t *call, int Py_UNUSED(timeout_ms),
                                wsync_error_t *Py_UNUSED(err))
{
    wsync_importer_fail(call->core, call->text);
    return WSYNC_OK;
}

WSYNC_PY_CALL_IF_OPEN(importer_fail, "fail", step_fail, NULL, WSYNC_PY_TEXT)

WSYNC_PY_NUMBER_GETTER(importer_generation, ((ImporterObject *)self)->generation)

/* Ring and manifest are those of the last begin, and stay readable after close. */
static PyObject *give_attached(PyObject *object, PyObject *value, const char *what)
{
    if (value == NULL) {
        return wsync_py_fail(wsync_py_state_of(object), WSYNC_ERR_STATE, "Importer",
                             "%s: no update has begun on this Importer", what);
    }
    return Py_NewRef(value);
}

static PyObject *importer_ring(PyObject *object, void *Py_UNUSED(closure))
{
    return give_attached(object, ((ImporterObject *)object)->ring, "ring");
}

static PyObject *importer_bound(PyObject *object, void *Py_UNUSED(closure))
{
    PyObject *bound = ((ImporterObject *)object)->bound;

    return Py_NewRef(bound != NULL ? bound : Py_None);
}

static PyObject *importer_segments(PyObject *object, void *Py_UNUSED(closure))
{
    wsync_py_peer_t *peer = (wsync_py_peer_t *)object;
    PyObject *segments;

    if (wsync_py_peer_enter(peer) < 0) {
        return NULL;
    }
    segments = wrap_segments((ImporterObject *)object);
    wsync_py_peer_leave(peer);
    return segments;
}

static PyObject *importer_manifest(PyObject *object, void *Py_UNUSED(closure))
{
    return give_attached(object, ((ImporterObject *)object)->manifest, "manifest");
}

#define METHOD(name, text) {#name, WSYNC_PY_CALLED(importer_##name), text}

static PyMethodDef importer_methods[] = {
    METHOD(begin, "begin($self, timeout, check=None)\n--\n\n"),
    METHOD(take, "take($self, round, stream, timeout, check=None)\n--\n\n"),
    METHOD(wait, "wait($self, round, timeout, check=None)\n--\n\n"),
    METHOD(done, "done($self, round, stream, timeout, check=None)\n--\n\n"),
    METHOD(prepared,
           "prepared($self, tensors, nbytes, audit_ns, timeout, check=None)\n--\n\n"),
    METHOD(verdict, "verdict($self, timeout, check=None)\n--\n\n"),
    METHOD(fail, "fail($self, text)\n--\n\n"),
    {"close", wsync_py_peer_close, METH_NOARGS, "close($self)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyObject *importer_arrived(PyObject *object, void *Py_UNUSED(closure))
{
    wsync_py_peer_t *peer = (wsync_py_peer_t *)object;
    uint32_t rounds;

    if (wsync_py_peer_enter(peer) < 0) {
        return NULL;
    }
    rounds = wsync_importer_arrived(peer->core);
    wsync_py_peer_leave(peer);
    return PyLong_FromUnsignedLong(rounds);
}

static PyGetSetDef importer_getset[] = {
    {"arrived", importer_arrived, NULL, NULL, NULL},
    {"generation", importer_generation, NULL, NULL, NULL},
    {"ring", importer_ring, NULL, NULL, NULL},
    {"bound", importer_bound, NULL, NULL, NULL},
    {"segments", importer_segments, NULL, NULL, NULL},
    {"manifest", importer_manifest, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot importer_slots[] = {
    {Py_tp_doc, "Importer(address, blob, timeout, device=None)\n--\n\n"},
    {Py_tp_new, importer_new},
    {Py_tp_dealloc, importer_dealloc},
    {Py_tp_methods, importer_methods},
    {Py_tp_getset, importer_getset},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_Importer = {
    "wsync._core.Importer", sizeof(ImporterObject), 0, importer_slots, NULL, NULL};
