/* SPDX-License-Identifier: Apache-2.0
 * The trainer's half of a session. */
#include "ipc/session.h"

#include <stdlib.h>

#include "python/device.h"
#include "python/guard.h"

typedef struct ExporterObject {
    PyObject_HEAD
    wsync_exporter_t *exporter; /* owned; NULL once closed */
    PyObject *ring;             /* owned; the Memory that is attached */
    wsync_py_guard_t guard;
    char address[WSYNC_ADDRESS_NBYTES];
} ExporterObject;

/* One call's arguments and results, for a step without the GIL. */
typedef struct exporter_call {
    wsync_exporter_t *exporter;
    wsync_memory_t *ring;
    wsync_stream_t *stream;
    const uint8_t *data;
    uint8_t *blob;
    size_t nbytes;
    uint64_t update;
    int64_t wait_round;
    uint32_t round;
    bool park;
    wsync_receipt_t receipt;
} exporter_call_t;

static const char exporter_name[] = "Exporter";

static int exporter_wait(ExporterObject *self, wsync_py_step_func_t step,
                         exporter_call_t *call, double timeout, PyObject *check)
{
    call->exporter = self->exporter;
    return wsync_py_guarded_wait(wsync_py_type_state(Py_TYPE((PyObject *)self)),
                                 &self->guard, exporter_name, step, call, timeout, check);
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
    self->exporter = exporter;
    wsync_address_format(wsync_exporter_token(exporter), wsync_exporter_path(exporter),
                         self->address);
    return (PyObject *)self;
}

static void exporter_release(ExporterObject *self)
{
    wsync_exporter_t *exporter = self->exporter;

    self->exporter = NULL;
    self->guard.closed = true;
    Py_BEGIN_ALLOW_THREADS
        wsync_exporter_destroy(exporter);
    Py_END_ALLOW_THREADS
    Py_CLEAR(self->ring);
}

static void exporter_dealloc(PyObject *object)
{
    exporter_release((ExporterObject *)object);
    wsync_py_free(object);
}

static PyObject *exporter_address(PyObject *object, void *closure)
{
    (void)closure;
    return PyUnicode_DecodeFSDefault(((ExporterObject *)object)->address);
}

static PyObject *exporter_worker_uuid(PyObject *object, void *closure)
{
    ExporterObject *self = (ExporterObject *)object;
    char text[WSYNC_PY_UUID_NBYTES];

    (void)closure;
    if (wsync_py_guard_enter(wsync_py_type_state(Py_TYPE(object)), &self->guard,
                             exporter_name) < 0) {
        return NULL;
    }
    wsync_py_uuid_format(wsync_exporter_worker_uuid(self->exporter), text);
    wsync_py_guard_leave(&self->guard);
    return PyUnicode_FromString(text);
}

static PyObject *exporter_loaded(PyObject *object, void *closure)
{
    ExporterObject *self = (ExporterObject *)object;
    uint32_t rounds;

    (void)closure;
    if (wsync_py_guard_enter(wsync_py_type_state(Py_TYPE(object)), &self->guard,
                             exporter_name) < 0) {
        return NULL;
    }
    rounds = wsync_exporter_loaded(self->exporter);
    wsync_py_guard_leave(&self->guard);
    return PyLong_FromUnsignedLong(rounds);
}

static wsync_status_t step_accept(void *context, int timeout_ms, wsync_error_t *err)
{
    exporter_call_t *call = context;

    return wsync_exporter_accept(call->exporter, timeout_ms, &call->blob, &call->nbytes,
                                 err);
}

static PyObject *exporter_accept(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"timeout", "check", NULL};
    exporter_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;
    PyObject *blob;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "d|O:accept", keywords, &timeout,
                                     &check) ||
        exporter_wait((ExporterObject *)object, step_accept, &call, timeout, check) < 0) {
        return NULL;
    }
    blob = PyBytes_FromStringAndSize((const char *)call.blob, (Py_ssize_t)call.nbytes);
    free(call.blob);
    return blob;
}

static wsync_status_t step_attach(void *context, int timeout_ms, wsync_error_t *err)
{
    exporter_call_t *call = context;

    return wsync_exporter_attach(call->exporter, call->ring, call->data, call->nbytes,
                                 timeout_ms, err);
}

static PyObject *exporter_attach(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"ring", "manifest", "timeout", "check", NULL};
    ExporterObject *self = (ExporterObject *)object;
    ModuleState *state = wsync_py_type_state(Py_TYPE(object));
    exporter_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;
    PyObject *ring = NULL;
    Py_buffer manifest;
    int result;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!y*d|O:attach", keywords,
                                     state->type_Memory, &ring, &manifest, &timeout,
                                     &check)) {
        return NULL;
    }
    call.ring = ((MemoryObject *)ring)->memory;
    call.data = manifest.buf;
    call.nbytes = (size_t)manifest.len;
    result = exporter_wait(self, step_attach, &call, timeout, check);
    PyBuffer_Release(&manifest);
    if (result < 0) {
        return NULL;
    }
    wsync_py_assign(&self->ring, Py_NewRef(ring));
    Py_RETURN_NONE;
}

static wsync_status_t step_begin(void *context, int timeout_ms, wsync_error_t *err)
{
    exporter_call_t *call = context;

    return wsync_exporter_begin(call->exporter, call->update, call->round, timeout_ms, err);
}

static PyObject *exporter_begin(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"update", "rounds", "timeout", "check", NULL};
    exporter_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&d|O:begin", keywords,
                                     wsync_py_convert_u64, &call.update,
                                     wsync_py_convert_u32, &call.round, &timeout, &check)) {
        return NULL;
    }
    if (exporter_wait((ExporterObject *)object, step_begin, &call, timeout, check) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static wsync_status_t step_acquire(void *context, int timeout_ms, wsync_error_t *err)
{
    exporter_call_t *call = context;

    return wsync_exporter_acquire(call->exporter, call->wait_round, call->stream,
                                  timeout_ms, err);
}

static PyObject *exporter_acquire(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"wait_round", "stream", "timeout", "check", NULL};
    ModuleState *state = wsync_py_type_state(Py_TYPE(object));
    exporter_call_t call = {0};
    PyObject *stream = NULL;
    long long wait_round = 0;
    double timeout = 0.0;
    PyObject *check = NULL;
    int result;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LOd|O:acquire", keywords, &wait_round,
                                     &stream, &timeout, &check) ||
        wsync_py_stream_enter_any(state, stream, &call.stream) < 0) {
        return NULL;
    }
    call.wait_round = wait_round;
    result = exporter_wait((ExporterObject *)object, step_acquire, &call, timeout, check);
    wsync_py_stream_leave_any(stream);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *exporter_look(PyObject *object, PyObject *unused)
{
    ExporterObject *self = (ExporterObject *)object;
    ModuleState *state = wsync_py_type_state(Py_TYPE(object));
    wsync_error_t err = {0};
    wsync_status_t status;

    (void)unused;
    if (!self->guard.closed && self->guard.busy) {
        Py_RETURN_NONE; /* below a wait of its own, which looks as well */
    }
    if (wsync_py_guard_enter(state, &self->guard, exporter_name) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_exporter_look(self->exporter, &err);
    Py_END_ALLOW_THREADS
    wsync_py_guard_leave(&self->guard);
    return wsync_py_none(state, status, &err);
}

static wsync_status_t step_post(void *context, int timeout_ms, wsync_error_t *err)
{
    exporter_call_t *call = context;

    return wsync_exporter_post(call->exporter, call->round, call->stream, timeout_ms, err);
}

static PyObject *exporter_post(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"round", "stream", "timeout", "check", NULL};
    ModuleState *state = wsync_py_type_state(Py_TYPE(object));
    exporter_call_t call = {0};
    PyObject *stream = NULL;
    double timeout = 0.0;
    PyObject *check = NULL;
    int result;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O!d|O:post", keywords,
                                     wsync_py_convert_u32, &call.round, state->type_Stream,
                                     &stream, &timeout, &check)) {
        return NULL;
    }
    call.stream = wsync_py_stream_enter(state, (StreamObject *)stream);
    if (call.stream == NULL) {
        return NULL;
    }
    result = exporter_wait((ExporterObject *)object, step_post, &call, timeout, check);
    wsync_py_stream_leave((StreamObject *)stream);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static wsync_status_t step_prepared(void *context, int timeout_ms, wsync_error_t *err)
{
    exporter_call_t *call = context;

    return wsync_exporter_prepared(call->exporter, timeout_ms, &call->receipt, err);
}

static PyObject *exporter_prepared(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"timeout", "check", NULL};
    exporter_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "d|O:prepared", keywords, &timeout,
                                     &check) ||
        exporter_wait((ExporterObject *)object, step_prepared, &call, timeout, check) < 0) {
        return NULL;
    }
    return Py_BuildValue("KKK", (unsigned long long)call.receipt.tensor_count,
                         (unsigned long long)call.receipt.nbytes,
                         (unsigned long long)call.receipt.checksum);
}

static wsync_status_t step_commit(void *context, int timeout_ms, wsync_error_t *err)
{
    exporter_call_t *call = context;

    return wsync_exporter_commit(call->exporter, call->park, timeout_ms, err);
}

static PyObject *exporter_commit(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"timeout", "check", "park", NULL};
    exporter_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;
    int park = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "d|Op:commit", keywords, &timeout,
                                     &check, &park)) {
        return NULL;
    }
    call.park = park != 0;
    if (exporter_wait((ExporterObject *)object, step_commit, &call, timeout, check) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static wsync_status_t step_park(void *context, int timeout_ms, wsync_error_t *err)
{
    exporter_call_t *call = context;

    return wsync_exporter_park(call->exporter, timeout_ms, err);
}

static PyObject *exporter_park(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"timeout", "check", NULL};
    exporter_call_t call = {0};
    double timeout = 0.0;
    PyObject *check = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "d|O:park", keywords, &timeout,
                                     &check) ||
        exporter_wait((ExporterObject *)object, step_park, &call, timeout, check) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *exporter_abort(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"text", NULL};
    ExporterObject *self = (ExporterObject *)object;
    const char *text = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:abort", keywords, &text)) {
        return NULL;
    }
    if (self->guard.closed) {
        Py_RETURN_NONE;
    }
    if (wsync_py_guard_enter(wsync_py_type_state(Py_TYPE(object)), &self->guard,
                             exporter_name) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        wsync_exporter_abort(self->exporter, text);
    Py_END_ALLOW_THREADS
    wsync_py_guard_leave(&self->guard);
    Py_RETURN_NONE;
}

static PyObject *exporter_close(PyObject *object, PyObject *unused)
{
    ExporterObject *self = (ExporterObject *)object;

    (void)unused;
    if (!self->guard.closed) {
        if (wsync_py_guard_enter(wsync_py_type_state(Py_TYPE(object)), &self->guard,
                                 exporter_name) < 0) {
            return NULL;
        }
        exporter_release(self);
        wsync_py_guard_leave(&self->guard);
    }
    Py_RETURN_NONE;
}

#define METHOD(name, text)                                                              \
    {#name, (PyCFunction)(void (*)(void))exporter_##name, METH_VARARGS | METH_KEYWORDS, \
     text}

static PyMethodDef exporter_methods[] = {
    METHOD(accept,
           "accept($self, timeout, check=None)\n--\n\n"
           "Waits for the worker; returns what it says of itself."),
    METHOD(attach,
           "attach($self, ring, manifest, timeout, check=None)\n--\n\n"
           "Gives the worker a ring and the manifest of what will lie in it."),
    METHOD(begin,
           "begin($self, update, rounds, timeout, check=None)\n--\n\nStarts an update."),
    METHOD(acquire,
           "acquire($self, wait_round, stream, timeout, check=None)\n--\n\n"
           "Has the stream wait until the worker has finished a round (None: waits here); "
           "-1: nothing to wait for."),
    {"look", exporter_look, METH_NOARGS,
     "look($self)\n--\n\n"
     "Raises what the worker has said, or that it is gone; waits for nothing, and does "
     "nothing\n"
     "while another call is under way."},
    METHOD(post,
           "post($self, round, stream, timeout, check=None)\n--\n\n"
           "Announces a round, ready when the stream gets here."),
    METHOD(prepared,
           "prepared($self, timeout, check=None)\n--\n\n"
           "Waits until the worker has loaded everything: (tensors, bytes, "
           "checksum)."),
    METHOD(commit,
           "commit($self, timeout, check=None, park=False)\n--\n\n"
           "Ends the update; with park, park() has to follow."),
    METHOD(park,
           "park($self, timeout, check=None)\n--\n\n"
           "Gives the ring's memory back on both sides until the next begin.\n\n"
           "PeerRefusedError: it stays where it is, because somebody looks at it; the "
           "session\n"
           "goes on."),
    METHOD(abort,
           "abort($self, text)\n--\n\nEnds the update badly and the session with it."),
    {"close", exporter_close, METH_NOARGS, "close($self)\n--\n\nEnds the session."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef exporter_getset[] = {
    {"address", exporter_address, NULL,
     "What a worker needs to connect: \"<token in hex>@<socket path>\".", NULL},
    {"worker_uuid", exporter_worker_uuid, NULL,
     "The GPU that the worker has said to be on, once accepted; \"\" for the host.", NULL},
    {"loaded", exporter_loaded, NULL,
     "Rounds of this update that the worker has finished, as far as is known.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot exporter_slots[] = {
    {Py_tp_doc,
     "Exporter(directory=None)\n--\n\n"
     "The trainer's half of a session: fills a ring that one worker reads."},
    {Py_tp_new, exporter_new},
    {Py_tp_dealloc, exporter_dealloc},
    {Py_tp_methods, exporter_methods},
    {Py_tp_getset, exporter_getset},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_Exporter = {
    "wsync._core.Exporter", sizeof(ExporterObject), 0, exporter_slots, NULL, NULL};
