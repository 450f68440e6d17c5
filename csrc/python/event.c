/* SPDX-License-Identifier: Apache-2.0
 * Event: a sequence number in memory that processes share. */
#include "python/call.h"
#include "python/convert.h"
#include "python/device_types.h"

static PyObject *event_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "offset", NULL};
    ModuleState *state = wsync_py_type_state(type);
    PyObject *memory;
    EventObject *self;
    wsync_event_t event = {0};
    wsync_error_t err = {0};

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O&:Event", names, state->type_Memory,
                                     &memory, wsync_py_convert_u64, &event.offset)) {
        return NULL;
    }
    event.memory = ((MemoryObject *)memory)->memory;
    if (wsync_event_check(event, &err) != WSYNC_OK) {
        return wsync_py_raise(state, &err);
    }
    self = (EventObject *)wsync_py_alloc(type);
    if (self == NULL) {
        return NULL;
    }
    Py_INCREF(memory);
    self->memory = (MemoryObject *)memory;
    self->event = event;
    return (PyObject *)self;
}

static void event_dealloc(PyObject *object)
{
    Py_XDECREF((PyObject *)((EventObject *)object)->memory);
    wsync_py_free(object);
}

static wsync_status_t event_step(wsync_py_call_t *call, int timeout_ms, wsync_error_t *err)
{
    const EventObject *self = call->core;

    return wsync_event_wait(self->event, call->value, timeout_ms, err);
}

static PyObject *event_wait(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"value", "timeout", "check", NULL};
    wsync_py_call_t call = {.core = object};

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&d|O:wait", names,
                                     wsync_py_convert_u64, &call.value, &call.timeout,
                                     &call.check) ||
        wsync_py_wait(wsync_py_state_of(object), event_step, &call) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

WSYNC_PY_NUMBER_GETTER(event_get_value, wsync_event_query(((EventObject *)self)->event))

static PyMethodDef event_methods[] = {
    {"wait", WSYNC_PY_KEYWORDS(event_wait),
     "wait($self, value, timeout, check=None)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef event_getset[] = {
    {"value", event_get_value, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot event_slots[] = {
    {Py_tp_doc, "Event(memory, offset)\n--\n\n"},
    {Py_tp_new, event_new},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_methods, event_methods},
    {Py_tp_getset, event_getset},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_Event = {
    "wsync._core.Event", sizeof(EventObject), 0, event_slots, NULL, NULL};
