/* SPDX-License-Identifier: Apache-2.0
 * The worker's half of a session. */
#include <stdlib.h>

#include "ipc/session.h"
#include "python/device.h"
#include "python/guard.h"

typedef struct ImporterObject {
    PyObject_HEAD
    wsync_importer_t *importer; /* owned; NULL once closed */
    PyObject *ring;      /* owned Memory; shares the importer's ring and outlives it */
    PyObject *manifest;  /* owned bytes */
    uint64_t generation; /* of ring and manifest */
    wsync_py_guard_t guard;
} ImporterObject;

/* One call's arguments and results, for a step without the GIL. */
typedef struct importer_call {
    const wsync_device_t *device;
    wsync_importer_t *importer;
    wsync_stream_t *stream;
    const char *path;
    const uint8_t *token;
    const uint8_t *data;
    size_t nbytes;
    uint64_t update;
    uint32_t round;
    wsync_receipt_t receipt;
} importer_call_t;

static const char importer_name[] = "Importer";

static int importer_wait(ImporterObject *self, wsync_py_step_func_t step,
                         importer_call_t *call, double timeout, PyObject *check)
{
    call->importer = self->importer;
    return wsync_py_guarded_wait(wsync_py_type_state(Py_TYPE((PyObject *)self)),
                                 &self->guard, importer_name, step, call, timeout, check);
}

static wsync_status_t step_create(void *context, int timeout_ms, wsync_error_t *err)
{
    importer_call_t *call = context;

    return wsync_importer_create(call->device, call->path, call->token, call->data,
                                 call->nbytes, timeout_ms, &call->importer, err);
}

static wsync_importer_t *connect_importer(ModuleState *state, const char *address,
                                          const Py_buffer *blob, double timeout,
                                          const wsync_device_t *device)
{
    uint8_t token[WSYNC_TOKEN_NBYTES];
    char path[WSYNC_PATH_NBYTES];
    wsync_error_t err = {0};
    importer_call_t call = {.device = device, .path = path, .token = token};

    call.data = blob->buf;
    call.nbytes = (size_t)blob->len;
    if (wsync_address_parse(address, token, path, &err) != WSYNC_OK) {
        (void)wsync_py_raise(state, &err);
        return NULL;
    }
    if (wsync_py_wait(state, step_create, &call, timeout, NULL) < 0) {
        return NULL;
    }
    return call.importer;
}

static PyObject *importer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"address", "blob", "timeout", "device", NULL};
    const char *address = NULL;
    Py_buffer blob;
    double timeout = 0.0;
    wsync_py_device_arg_t device = {wsync_py_type_state(type), wsync_device_host()};
    wsync_importer_t *importer;
    ImporterObject *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sy*d|O&:Importer", keywords, &address,
                                     &blob, &timeout, wsync_py_convert_device, &device)) {
        return NULL;
    }
    importer =
        connect_importer(wsync_py_type_state(type), address, &blob, timeout, device.device);
    PyBuffer_Release(&blob);
    if (importer == NULL) {
        return NULL;
    }
    self = (ImporterObject *)wsync_py_alloc(type);
    if (self == NULL) {
        wsync_importer_destroy(importer);
        return NULL;
    }
    self->importer = importer;
    return (PyObject *)self;
}

static void importer_release(ImporterObject *self)
{
    wsync_importer_t *importer = self->importer;

    self->importer = NULL;
    self->guard.closed = true;
    Py_BEGIN_ALLOW_THREADS
        wsync_importer_destroy(importer);
    Py_END_ALLOW_THREADS
}

static void importer_dealloc(PyObject *object)
{
    ImporterObject *self = (ImporterObject *)object;

    importer_release(self);
    Py_CLEAR(self->ring);
    Py_CLEAR(self->manifest);
    wsync_py_free(object);
}

/* Makes the Python objects of a new attach; the old ones live on in whoever holds them. */
static int refresh(ImporterObject *self)
{
    const uint64_t generation = wsync_importer_generation(self->importer);
    wsync_memory_t *memory = wsync_importer_ring(self->importer);
    size_t nbytes = 0;
    const uint8_t *data = wsync_importer_manifest(self->importer, &nbytes);
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
    ring = wsync_py_memory_wrap(wsync_py_type_state(Py_TYPE((PyObject *)self)), memory);
    if (ring == NULL) {
        Py_DECREF(manifest);
        return -1;
    }
    wsync_py_assign(&self->ring, ring);
    wsync_py_assign(&self->manifest, manifest);
    self->generation = generation;
    return 0;
}

static wsync_status_t step_begin(void *context, int timeout_ms, wsync_error_t *err)
{
    importer_call_t *call = context;

    return wsync_importer_begin(call->importer, timeout_ms, &call->update, &call->round,
                                err);
}

static PyObject *importer_begin(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"timeout", "check", NULL};
    ImporterObject *self = (ImporterObject *)object;
    importer_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "d|O:begin", keywords, &timeout,
                                     &check) ||
        importer_wait(self, step_begin, &call, timeout, check) < 0 || refresh(self) < 0) {
        return NULL;
    }
    return Py_BuildValue("KI", (unsigned long long)call.update, (unsigned int)call.round);
}

static wsync_status_t step_take(void *context, int timeout_ms, wsync_error_t *err)
{
    importer_call_t *call = context;

    return wsync_importer_take(call->importer, call->round, call->stream, timeout_ms, err);
}

/* take and done differ in the step alone; `format` is that of the arguments. */
static PyObject *run_on_stream(PyObject *object, PyObject *args, PyObject *kwargs,
                               const char *format, wsync_py_step_func_t step)
{
    static char *keywords[] = {"round", "stream", "timeout", "check", NULL};
    ModuleState *state = wsync_py_type_state(Py_TYPE(object));
    importer_call_t call = {0};
    PyObject *stream = NULL;
    double timeout = 0.0;
    PyObject *check = NULL;
    int result;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, keywords, wsync_py_convert_u32,
                                     &call.round, &stream, &timeout, &check) ||
        wsync_py_stream_enter_any(state, stream, &call.stream) < 0) {
        return NULL;
    }
    result = importer_wait((ImporterObject *)object, step, &call, timeout, check);
    wsync_py_stream_leave_any(stream);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *importer_take(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return run_on_stream(object, args, kwargs, "O&Od|O:take", step_take);
}

static wsync_status_t step_wait(void *context, int timeout_ms, wsync_error_t *err)
{
    importer_call_t *call = context;

    return wsync_importer_wait(call->importer, call->round, timeout_ms, err);
}

static PyObject *importer_wait_round(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"round", "timeout", "check", NULL};
    importer_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&d|O:wait", keywords,
                                     wsync_py_convert_u32, &call.round, &timeout, &check)) {
        return NULL;
    }
    if (importer_wait((ImporterObject *)object, step_wait, &call, timeout, check) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static wsync_status_t step_done(void *context, int timeout_ms, wsync_error_t *err)
{
    importer_call_t *call = context;

    return wsync_importer_done(call->importer, call->round, call->stream, timeout_ms, err);
}

static PyObject *importer_done(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return run_on_stream(object, args, kwargs, "O&Od|O:done", step_done);
}

static wsync_status_t step_prepared(void *context, int timeout_ms, wsync_error_t *err)
{
    importer_call_t *call = context;

    return wsync_importer_prepared(call->importer, &call->receipt, timeout_ms, err);
}

static PyObject *importer_prepared(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"tensors", "nbytes", "checksum", "timeout", "check", NULL};
    importer_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O&O&O&d|O:prepared", keywords, wsync_py_convert_u64,
            &call.receipt.tensor_count, wsync_py_convert_u64, &call.receipt.nbytes,
            wsync_py_convert_u64, &call.receipt.checksum, &timeout, &check)) {
        return NULL;
    }
    if (importer_wait((ImporterObject *)object, step_prepared, &call, timeout, check) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static wsync_status_t step_verdict(void *context, int timeout_ms, wsync_error_t *err)
{
    importer_call_t *call = context;

    return wsync_importer_verdict(call->importer, timeout_ms, err);
}

static PyObject *importer_verdict(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"timeout", "check", NULL};
    importer_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "d|O:verdict", keywords, &timeout,
                                     &check) ||
        importer_wait((ImporterObject *)object, step_verdict, &call, timeout, check) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *importer_fail(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"text", NULL};
    ImporterObject *self = (ImporterObject *)object;
    const char *text = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:fail", keywords, &text)) {
        return NULL;
    }
    if (self->guard.closed) {
        Py_RETURN_NONE;
    }
    if (wsync_py_guard_enter(wsync_py_type_state(Py_TYPE(object)), &self->guard,
                             importer_name) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        wsync_importer_fail(self->importer, text);
    Py_END_ALLOW_THREADS
    wsync_py_guard_leave(&self->guard);
    Py_RETURN_NONE;
}

static PyObject *importer_close(PyObject *object, PyObject *unused)
{
    ImporterObject *self = (ImporterObject *)object;

    (void)unused;
    if (!self->guard.closed) {
        if (wsync_py_guard_enter(wsync_py_type_state(Py_TYPE(object)), &self->guard,
                                 importer_name) < 0) {
            return NULL;
        }
        importer_release(self);
        wsync_py_guard_leave(&self->guard);
    }
    Py_RETURN_NONE;
}

static PyObject *importer_generation(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(((ImporterObject *)object)->generation);
}

/* Ring and manifest are those of the last begin, and stay readable after close. */
static PyObject *give_attached(PyObject *object, PyObject *value, const char *what)
{
    if (value == NULL) {
        return wsync_py_fail(wsync_py_type_state(Py_TYPE(object)), WSYNC_ERR_STATE,
                             importer_name, "%s: no update has begun on this Importer",
                             what);
    }
    return Py_NewRef(value);
}

static PyObject *importer_ring(PyObject *object, void *closure)
{
    (void)closure;
    return give_attached(object, ((ImporterObject *)object)->ring, "ring");
}

static PyObject *importer_manifest(PyObject *object, void *closure)
{
    (void)closure;
    return give_attached(object, ((ImporterObject *)object)->manifest, "manifest");
}

#define METHOD(name, text)                                                              \
    {#name, (PyCFunction)(void (*)(void))importer_##name, METH_VARARGS | METH_KEYWORDS, \
     text}

static PyMethodDef importer_methods[] = {
    METHOD(begin,
           "begin($self, timeout, check=None)\n--\n\n"
           "Waits for the next update, taking a new ring first if there is one: "
           "(update, rounds)."),
    METHOD(take,
           "take($self, round, stream, timeout, check=None)\n--\n\n"
           "Has the stream wait until a round lies in the ring (None: waits here)."),
    {"wait", WSYNC_PY_KEYWORDS(importer_wait_round),
     "wait($self, round, timeout, check=None)\n--\n\n"
     "Waits here until a round that was taken lies in the ring."},
    METHOD(done,
           "done($self, round, stream, timeout, check=None)\n--\n\n"
           "Gives the slot back when the stream gets here (None: now)."),
    METHOD(prepared,
           "prepared($self, tensors, nbytes, checksum, timeout, check=None)\n--\n\n"
           "Says that everything is loaded."),
    METHOD(verdict,
           "verdict($self, timeout, check=None)\n--\n\n"
           "Waits for the commit; RemoteError carries the trainer's text."),
    METHOD(fail,
           "fail($self, text)\n--\n\n"
           "Tells the trainer that the update failed here; ends the session."),
    {"close", importer_close, METH_NOARGS, "close($self)\n--\n\nEnds the session."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef importer_getset[] = {
    {"generation", importer_generation, NULL,
     "Counts attaches: a change means that ring and manifest are new ones.", NULL},
    {"ring", importer_ring, NULL, "The ring; valid for as long as it is referenced.", NULL},
    {"manifest", importer_manifest, NULL, "What the trainer attached along with the ring.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot importer_slots[] = {
    {Py_tp_doc,
     "Importer(address, blob, timeout, device=None)\n--\n\n"
     "The worker's half of a session: reads the ring that a trainer rank fills."},
    {Py_tp_new, importer_new},
    {Py_tp_dealloc, importer_dealloc},
    {Py_tp_methods, importer_methods},
    {Py_tp_getset, importer_getset},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_Importer = {
    "wsync._core.Importer", sizeof(ImporterObject), 0, importer_slots, NULL, NULL};
