/* SPDX-License-Identifier: Apache-2.0 */
#include "python/call.h"

#include <stddef.h>
#include <time.h>

#include "python/convert.h"
#include "python/device_types.h"

enum { WAIT_SLICE_MS = 50 };

/* --- objects in use ------------------------------------------------------------------- */

static ModuleState *state_of(wsync_py_peer_t *peer)
{
    return wsync_py_state_of((PyObject *)peer);
}

int wsync_py_peer_enter(wsync_py_peer_t *peer)
{
    if (peer->closed || peer->busy) {
        (void)wsync_py_fail(state_of(peer), WSYNC_ERR_STATE, peer->name, "%s %s",
                            peer->name,
                            peer->closed ? "is closed" : "is in use by another call");
        return -1;
    }
    peer->busy = true;
    return 0;
}

void wsync_py_peer_leave(wsync_py_peer_t *peer)
{
    peer->busy = false;
}

PyObject *wsync_py_peer_close(PyObject *self, PyObject *Py_UNUSED(unused))
{
    wsync_py_peer_t *peer = (wsync_py_peer_t *)self;

    if (!peer->closed) {
        if (wsync_py_peer_enter(peer) < 0) {
            return NULL;
        }
        peer->closed = true;
        peer->release(peer);
        wsync_py_peer_leave(peer);
    }
    Py_RETURN_NONE;
}

/* --- waiting -------------------------------------------------------------------------- */

static double monotonic_seconds(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

int wsync_py_wait(ModuleState *state, wsync_py_step_func_t step, wsync_py_call_t *call)
{
    const double deadline = monotonic_seconds() + call->timeout;

    for (;;) {
        wsync_error_t err = {0};
        wsync_status_t status;
        const double left = deadline - monotonic_seconds();
        int slice = WAIT_SLICE_MS;

        if (left * 1000.0 < (double)slice) {
            slice = left > 0.0 ? (int)(left * 1000.0) + 1 : 0;
        }
        Py_BEGIN_ALLOW_THREADS
            status = step(call, slice, &err);
        Py_END_ALLOW_THREADS
        if (status == WSYNC_OK) {
            return 0;
        }
        if (status != WSYNC_ERR_TIMEOUT) {
            (void)wsync_py_raise(state, &err);
            return -1;
        }
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
        if (call->check != NULL && call->check != Py_None) {
            PyObject *result = PyObject_CallNoArgs(call->check);

            if (result == NULL) {
                return -1;
            }
            Py_DECREF(result);
        }
        if (!(monotonic_seconds() < deadline)) { /* a NaN is no deadline to wait for */
            (void)wsync_py_raise(state, &err);
            return -1;
        }
    }
}

/* --- arguments ------------------------------------------------------------------------ */

static int convert_object(PyObject *object, void *slot)
{
    *(PyObject **)slot = object;
    return 1;
}

static int convert_seconds(PyObject *object, void *seconds)
{
    *(double *)seconds = PyFloat_AsDouble(object);
    return PyErr_Occurred() == NULL;
}

static int convert_i64(PyObject *object, void *number)
{
    *(int64_t *)number = PyLong_AsLongLong(object);
    return PyErr_Occurred() == NULL;
}

static int convert_flag(PyObject *object, void *flag)
{
    *(int *)flag = PyObject_IsTrue(object);
    return *(int *)flag >= 0;
}

static int convert_text(PyObject *object, void *text)
{
    *(const char **)text = PyUnicode_AsUTF8AndSize(object, NULL);
    return *(const char **)text != NULL;
}

static int convert_buffer(PyObject *object, void *buffer)
{
    return PyObject_GetBuffer(object, buffer, PyBUF_SIMPLE) == 0;
}

static const struct {
    const char *name;
    int (*convert)(PyObject *object, void *field);
    size_t field;
    size_t type;   /* slot in the module state of the type that is demanded; or 0 */
    bool optional; /* only the last parameters of a method are */
} parameters[WSYNC_PY_PARAMETER_COUNT] = {
#define FIELD(name) offsetof(wsync_py_call_t, name)
#define TYPE(name) offsetof(ModuleState, type_##name)
    [WSYNC_PY_TIMEOUT] = {"timeout", convert_seconds, FIELD(timeout), 0, false},
    [WSYNC_PY_CHECK] = {"check", convert_object, FIELD(check), 0, true},
    [WSYNC_PY_RING] = {"ring", convert_object, FIELD(ring), TYPE(Memory), false},
    [WSYNC_PY_MEMORY] = {"memory", convert_object, FIELD(memory), TYPE(Memory), false},
    [WSYNC_PY_BINDINGS] = {"bindings", convert_buffer, FIELD(manifest), 0, false},
    [WSYNC_PY_PLAN] = {"plan", convert_object, FIELD(plan), TYPE(Plan), false},
    [WSYNC_PY_STREAM] = {"stream", convert_object, FIELD(on), 0, false},
    [WSYNC_PY_ENQUEUE_STREAM] = {"stream", convert_object, FIELD(on), TYPE(Stream), false},
    [WSYNC_PY_TEXT] = {"text", convert_text, FIELD(text), 0, false},
    [WSYNC_PY_MANIFEST] = {"manifest", convert_buffer, FIELD(manifest), 0, false},
    [WSYNC_PY_WAIT_ROUND] = {"wait_round", convert_i64, FIELD(wait_round), 0, false},
    [WSYNC_PY_UPDATE] = {"update", wsync_py_convert_u64, FIELD(update), 0, false},
    [WSYNC_PY_ROUND] = {"round", wsync_py_convert_u32, FIELD(round), 0, false},
    [WSYNC_PY_ROUNDS] = {"rounds", wsync_py_convert_u32, FIELD(rounds), 0, false},
    [WSYNC_PY_PARK] = {"park", convert_flag, FIELD(park), 0, true},
    [WSYNC_PY_TENSORS] = {"tensors", wsync_py_convert_u64, FIELD(receipt.tensor_count), 0,
                          false},
    [WSYNC_PY_NBYTES] = {"nbytes", wsync_py_convert_u64, FIELD(receipt.nbytes), 0, false},
    [WSYNC_PY_AUDIT_NS] = {"audit_ns", wsync_py_convert_u64, FIELD(receipt.audit_ns), 0,
                           false},
#undef FIELD
#undef TYPE
};

static int convert_argument(ModuleState *state, wsync_py_parameter_t parameter,
                            PyObject *object, wsync_py_call_t *call)
{
    const size_t slot = parameters[parameter].type;

    if (slot != 0 && wsync_py_check_type(object, *(PyTypeObject **)((char *)state + slot),
                                         parameters[parameter].name) < 0) {
        return -1;
    }
    return parameters[parameter].convert(object, (char *)call + parameters[parameter].field)
               ? 0
               : -1;
}

/* The place of a named argument among the method's parameters, or that of WSYNC_PY_END. */
static Py_ssize_t find_parameter(const wsync_py_method_t *method, PyObject *name)
{
    Py_ssize_t i = 0;

    while (method->parameters[i] != WSYNC_PY_END &&
           PyUnicode_CompareWithASCIIString(name, parameters[method->parameters[i]].name) !=
               0) {
        i++;
    }
    return i;
}

/* Fills a call from the arguments of a method, of which some have names.  Its buffer has to
 * be released, even after an error.  Python's own parser would read a format at each call
 * of a round. */
static int parse_call(ModuleState *state, PyObject *const *args, Py_ssize_t unnamed,
                      PyObject *names, const wsync_py_method_t *method,
                      wsync_py_call_t *call)
{
    const Py_ssize_t count = unnamed + (names == NULL ? 0 : PyTuple_Size(names));
    bool given[WSYNC_PY_MAX_PARAMETERS] = {false};
    Py_ssize_t known = 0;

    while (method->parameters[known] != WSYNC_PY_END) {
        known++;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const Py_ssize_t place =
            i < unnamed ? i : find_parameter(method, PyTuple_GetItem(names, i - unnamed));

        if (place >= known || given[place]) {
            PyErr_Format(PyExc_TypeError, "%s(): argument %zd is unknown or given twice",
                         method->name, i + 1);
            return -1;
        }
        if (convert_argument(state, method->parameters[place], args[i], call) < 0) {
            return -1;
        }
        given[place] = true;
    }
    for (Py_ssize_t i = 0; i < known; i++) {
        if (!given[i] && !parameters[method->parameters[i]].optional) {
            PyErr_Format(PyExc_TypeError, "%s() is missing the argument '%s'", method->name,
                         parameters[method->parameters[i]].name);
            return -1;
        }
    }
    return 0;
}

/* --- methods -------------------------------------------------------------------------- */

PyObject *wsync_py_call_run(wsync_py_peer_t *peer, wsync_py_step_func_t step,
                            wsync_py_result_func_t give, wsync_py_call_t *call)
{
    ModuleState *state = state_of(peer);
    PyObject *result = NULL;

    if (call->on != NULL && wsync_py_stream_enter_any(state, call->on, &call->stream) < 0) {
        return NULL;
    }
    if (wsync_py_peer_enter(peer) == 0) {
        call->core = peer->core;
        if (wsync_py_wait(state, step, call) == 0) {
            result = give != NULL ? give((PyObject *)peer, call) : Py_NewRef(Py_None);
        }
        wsync_py_peer_leave(peer);
    }
    if (call->on != NULL) {
        wsync_py_stream_leave_any(call->on);
    }
    return result;
}

PyObject *wsync_py_call(PyObject *self, PyObject *const *args, Py_ssize_t unnamed,
                        PyObject *names, const wsync_py_method_t *method)
{
    wsync_py_peer_t *peer = (wsync_py_peer_t *)self;
    wsync_py_call_t call = {0};
    PyObject *result = NULL;

    if (parse_call(state_of(peer), args, unnamed, names, method, &call) == 0) {
        result = method->if_open && peer->closed
                     ? Py_NewRef(Py_None)
                     : wsync_py_call_run(peer, method->step, method->give, &call);
    }
    PyBuffer_Release(&call.manifest); /* nothing where there is none */
    return result;
}
