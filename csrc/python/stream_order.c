/* SPDX-License-Identifier: Apache-2.0
 * Methods of Stream that put its work in an order with events and with other streams. */
#include "python/convert.h"
#include "python/device.h"

typedef wsync_status_t (*enqueue_func_t)(wsync_stream_t *, wsync_event_t, uint64_t,
                                         wsync_error_t *);

/* record and wait: `enqueue` is the device's, `format` that of the arguments. */
static PyObject *enqueue_event(PyObject *object, PyObject *args, PyObject *kwargs,
                               const char *format, enqueue_func_t enqueue)
{
    static char *names[] = {"event", "value", NULL};
    StreamObject *self = (StreamObject *)object;
    ModuleState *state = wsync_py_type_state(Py_TYPE(object));
    PyObject *event;
    uint64_t value;
    wsync_stream_t *stream;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, state->type_Event, &event,
                                     wsync_py_convert_u64, &value)) {
        return NULL;
    }
    stream = wsync_py_stream_enter(state, self);
    if (stream == NULL) {
        return NULL;
    }
    /* a driver whose queue is full waits, and whoever ends that may need the lock */
    Py_BEGIN_ALLOW_THREADS
        status = enqueue(stream, ((EventObject *)event)->event, value, &err);
    Py_END_ALLOW_THREADS
    wsync_py_stream_leave(self);
    return wsync_py_none(state, status, &err);
}

PyObject *wsync_py_stream_record(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return enqueue_event(object, args, kwargs, "O!O&:record", wsync_stream_record);
}

PyObject *wsync_py_stream_wait(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return enqueue_event(object, args, kwargs, "O!O&:wait", wsync_stream_wait);
}

/* follow and lead: `enqueue` is the device's, `format` that of the argument. */
static PyObject *order_streams(PyObject *object, PyObject *args, const char *format,
                               wsync_status_t (*enqueue)(wsync_stream_t *, void *,
                                                         wsync_error_t *))
{
    StreamObject *self = (StreamObject *)object;
    ModuleState *state = wsync_py_type_state(Py_TYPE(object));
    PyObject *number;
    void *other;
    wsync_stream_t *stream;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTuple(args, format, &number)) {
        return NULL;
    }
    other = PyLong_AsVoidPtr(number);
    if (other == NULL && PyErr_Occurred() != NULL) {
        return NULL;
    }
    stream = wsync_py_stream_enter(state, self);
    if (stream == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = enqueue(stream, other, &err);
    Py_END_ALLOW_THREADS
    wsync_py_stream_leave(self);
    return wsync_py_none(state, status, &err);
}

PyObject *wsync_py_stream_follow(PyObject *object, PyObject *args)
{
    return order_streams(object, args, "O:follow", wsync_stream_follow);
}

PyObject *wsync_py_stream_lead(PyObject *object, PyObject *args)
{
    return order_streams(object, args, "O:lead", wsync_stream_lead);
}
