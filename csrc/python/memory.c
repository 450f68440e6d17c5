/* SPDX-License-Identifier: Apache-2.0
 * Memory, Event and BufferTable. */
#include "python/device.h"

#include <stdlib.h>
#include <string.h>

#include "device/cuda_spans.h"
#include "python/call.h"
#include "python/tensor_table.h"

/* "O&" converter to uint64_t: ValueError outside its range. */
static int to_uint64(PyObject *object, void *result)
{
    const unsigned long long value = PyLong_AsUnsignedLongLong(object);

    if (value == (unsigned long long)-1 && PyErr_Occurred() != NULL) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_ValueError, "%R is not between 0 and 2**64 - 1", object);
        }
        return 0;
    }
    *(uint64_t *)result = value;
    return 1;
}

/* --- Memory ----------------------------------------------------------------------------
 */

PyObject *wsync_py_memory_wrap(ModuleState *state, wsync_memory_t *memory)
{
    PyObject *self = wsync_py_alloc(state->type_Memory);

    if (self == NULL) {
        wsync_memory_destroy(memory);
        return NULL;
    }
    ((MemoryObject *)self)->memory = memory;
    return self;
}

static PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"nbytes", "device", "control", NULL};
    ModuleState *state = wsync_py_type_state(type);
    wsync_py_device_arg_t device = {state, wsync_device_host()};
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    uint64_t nbytes;
    int control = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|O&p:Memory", names, to_uint64,
                                     &nbytes, wsync_py_convert_device, &device, &control)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = (control ? wsync_control_create : wsync_memory_create)(
            device.device, nbytes, &memory, &err);
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        return wsync_py_raise(state, &err);
    }
    return wsync_py_memory_wrap(state, memory);
}

static PyObject *memory_from_fd(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", "nbytes", "device", NULL};
    ModuleState *state = wsync_py_state(module);
    wsync_py_device_arg_t device = {state, wsync_device_host()};
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    uint64_t nbytes;
    int fd;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO&|O&:from_fd", names, &fd, to_uint64,
                                     &nbytes, wsync_py_convert_device, &device)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_memory_import(device.device, fd, nbytes, &memory, &err);
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        return wsync_py_raise(state, &err);
    }
    return wsync_py_memory_wrap(state, memory);
}

static void memory_dealloc(PyObject *object)
{
    MemoryObject *self = (MemoryObject *)object;

    if (self->memory != NULL) {
        /* A driver may wait for its device, and that for a thread of this process. */
        Py_BEGIN_ALLOW_THREADS
            wsync_memory_destroy(self->memory);
        Py_END_ALLOW_THREADS
    }
    wsync_py_free(object);
}

static PyObject *memory_fileno(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const MemoryObject *self = (MemoryObject *)object;
    const int fd = self->memory->fd;

    if (fd < 0) {
        return wsync_py_fail(wsync_py_type_state(Py_TYPE(object)), WSYNC_ERR_STATE,
                             "fileno", "the memory is parked");
    }
    return PyLong_FromLong(fd);
}

static PyObject *memory_get_address(PyObject *object, void *Py_UNUSED(unused))
{
    const MemoryObject *self = (MemoryObject *)object;

    return PyLong_FromVoidPtr(self->memory->data);
}

static PyObject *memory_get_nbytes(PyObject *object, void *Py_UNUSED(unused))
{
    const MemoryObject *self = (MemoryObject *)object;

    return PyLong_FromUnsignedLongLong(self->memory->nbytes);
}

static int memory_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    const MemoryObject *self = (MemoryObject *)object;
    wsync_error_t err = {0};

    view->obj = NULL;
    if (self->memory->device != wsync_device_host()) {
        PyErr_SetString(PyExc_BufferError, "memory of a GPU has no buffer on the host");
        return -1;
    }
    if (wsync_memory_pin(self->memory, &err) != WSYNC_OK) {
        PyErr_SetString(PyExc_BufferError, err.message);
        return -1;
    }
    if (PyBuffer_FillInfo(view, object, self->memory->data,
                          (Py_ssize_t)self->memory->nbytes, 0, flags) < 0) {
        wsync_memory_unpin(self->memory);
        return -1;
    }
    return 0;
}

static void memory_releasebuffer(PyObject *object, Py_buffer *Py_UNUSED(view))
{
    const MemoryObject *self = (MemoryObject *)object;

    wsync_memory_unpin(self->memory);
}

static PyMethodDef memory_methods[] = {
    {"fileno", memory_fileno, METH_NOARGS,
     "fileno($self, /)\n--\n\nWhat another process maps; valid as long as this object."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef memory_getset[] = {
    {"address", memory_get_address, NULL, "Where the memory is mapped in this process.",
     NULL},
    {"nbytes", memory_get_nbytes, NULL, "Size in bytes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot memory_slots[] = {
    {Py_tp_doc,
     "Memory(nbytes, device=None, control=False)\n--\n\n"
     "Memory that another process can map: of a GPU, or shared memory of the host (a\n"
     "sealed memfd), mapped and faulted in.\n\n"
     "Zeroed; that of the host supports the buffer protocol (writable bytes).  control:\n"
     "it holds events and nothing else."},
    {Py_tp_new, memory_new},
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_methods, memory_methods},
    {Py_tp_getset, memory_getset},
    {Py_bf_getbuffer, memory_getbuffer},
    {Py_bf_releasebuffer, memory_releasebuffer},
    {0, NULL},
};

static PyMethodDef memory_static_methods[] = {
    {"from_fd", WSYNC_PY_KEYWORDS(memory_from_fd),
     "from_fd(fd, nbytes, device=None)\n--\n\nMaps memory that another process made; fd is "
     "duplicated.\n\n"
     "PeerRefusedError if it is not sealed against a change of size, InvalidArgumentError\n"
     "if its size is not nbytes."},
    {NULL, NULL, 0, NULL},
};

const wsync_py_type_t wsync_py_type_Memory = {
    "wsync._core.Memory", sizeof(MemoryObject),  0,
    memory_slots,         memory_static_methods, NULL};

/* --- Event -----------------------------------------------------------------------------
 */

static PyObject *event_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "offset", NULL};
    ModuleState *state = wsync_py_type_state(type);
    PyObject *memory;
    EventObject *self;
    wsync_event_t event = {0};
    wsync_error_t err = {0};

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O&:Event", names, state->type_Memory,
                                     &memory, to_uint64, &event.offset)) {
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

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&d|O:wait", names, to_uint64,
                                     &call.value, &call.timeout, &call.check) ||
        wsync_py_wait(wsync_py_type_state(Py_TYPE(object)), event_step, &call) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *event_get_value(PyObject *object, void *Py_UNUSED(unused))
{
    const EventObject *self = (EventObject *)object;

    return PyLong_FromUnsignedLongLong(wsync_event_query(self->event));
}

static PyMethodDef event_methods[] = {
    {"wait", WSYNC_PY_KEYWORDS(event_wait),
     "wait($self, value, timeout, check=None)\n--\n\n"
     "Waits until the event is at least value; DeadlineError after timeout seconds."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef event_getset[] = {
    {"value", event_get_value, NULL, "The last value that was recorded.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot event_slots[] = {
    {Py_tp_doc,
     "Event(memory, offset)\n--\n\n"
     "A 64-bit sequence number in memory that two processes share."},
    {Py_tp_new, event_new},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_methods, event_methods},
    {Py_tp_getset, event_getset},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_Event = {
    "wsync._core.Event", sizeof(EventObject), 0, event_slots, NULL, NULL};

/* --- BufferTable -----------------------------------------------------------------------
 */

/* A table with room for count spans, all zero. */
static BufferTableObject *buffers_alloc(ModuleState *state, size_t count, PyObject *owner)
{
    BufferTableObject *self = (BufferTableObject *)wsync_py_alloc(state->type_BufferTable);

    if (self == NULL) {
        return NULL;
    }
    self->spans = calloc(count > 0 ? count : 1, sizeof(*self->spans));
    if (self->spans == NULL) {
        Py_DECREF((PyObject *)self);
        PyErr_NoMemory();
        return NULL;
    }
    self->count = count;
    self->gpu = -1;
    self->owner = Py_XNewRef(owner);
    return self;
}

PyObject *wsync_py_buffers_create(ModuleState *state, const wsync_device_t *device,
                                  const wsync_span_t *spans, size_t count, PyObject *owner)
{
    BufferTableObject *self = buffers_alloc(state, count, owner);

    if (self != NULL) {
        self->gpu = device->ordinal;
    }
    if (self != NULL && count > 0) {
        memcpy(self->spans, spans, count * sizeof(*spans));
    }
    return (PyObject *)self;
}

/* Reads (address, nbytes). */
static int parse_span(ModuleState *state, PyObject *item, size_t index, wsync_span_t *span)
{
    PyObject *pair = PySequence_Tuple(item);
    uint64_t address;
    uint64_t end;
    int result = -1;

    if (pair == NULL) {
        return -1;
    }
    if (PyTuple_Size(pair) != 2) {
        PyErr_Format(PyExc_ValueError, "span %zu is not (address, nbytes): %R", index,
                     item);
    } else if (to_uint64(PyTuple_GetItem(pair, 0), &address) &&
               to_uint64(PyTuple_GetItem(pair, 1), &span->nbytes)) {
        if ((address == 0 && span->nbytes > 0) ||
            __builtin_add_overflow(address, span->nbytes, &end) || end > UINTPTR_MAX) {
            (void)wsync_py_fail(state, WSYNC_ERR_INVALID, "BufferTable",
                                "span %zu: %llu bytes at address 0x%llx", index,
                                (unsigned long long)span->nbytes,
                                (unsigned long long)address);
        } else {
            span->data = PyLong_AsVoidPtr(PyTuple_GetItem(pair, 0));
            result = 0;
        }
    }
    Py_DECREF(pair);
    return result;
}

static PyObject *buffers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"spans", "owner", NULL};
    ModuleState *state = wsync_py_type_state(type);
    PyObject *spans;
    PyObject *owner = Py_None;
    PyObject *items;
    BufferTableObject *self = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:BufferTable", names, &spans,
                                     &owner)) {
        return NULL;
    }
    items = PySequence_Tuple(spans);
    if (items == NULL) {
        return NULL;
    }
    self = buffers_alloc(state, (size_t)PyTuple_Size(items), owner);
    for (size_t i = 0; self != NULL && i < self->count; i++) {
        if (parse_span(state, PyTuple_GetItem(items, (Py_ssize_t)i), i, &self->spans[i]) <
            0) {
            Py_CLEAR(self);
        }
    }
    Py_DECREF(items);
    return (PyObject *)self;
}

static int fail_unmapped(ModuleState *state, const TensorTableObject *table, size_t index)
{
    const wsync_tensor_row_t *row = &table->rows[index];
    PyObject *name = table->names != NULL
                         ? PyObject_Str(PyTuple_GetItem(table->names, (Py_ssize_t)index))
                         : PyUnicode_FromFormat("tensor %zu", index);
    const char *text = name != NULL ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;

    if (text != NULL) {
        (void)wsync_py_fail(state, WSYNC_ERR_STATE, "BufferTable",
                            "%s: no memory of GPU %d lies at its address %p, as when an "
                            "allocator (torch_memory_saver) has paused and not resumed",
                            text, table->gpu, row->data);
    }
    Py_XDECREF(name);
    return -1;
}

/* A thread that reads what is not there ends the process, and a device its context. */
static int check_mapped(ModuleState *state, const TensorTableObject *table)
{
    const wsync_cuda_device_t *device = NULL;
    const size_t count = (size_t)table->count;
    wsync_span_t *spans;
    size_t index = 0;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (table->gpu < 0) {
        return 0;
    }
    spans = calloc(count + 1, sizeof(*spans));
    if (spans == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        if (table->rows[i].on_gpu) {
            spans[i] = (wsync_span_t){table->rows[i].data, table->rows[i].nbytes_spanned};
        }
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_cuda_device(table->gpu, &device, &err);
        if (status == WSYNC_OK) {
            status = wsync_cuda_enter(device, &err);
        }
        if (status == WSYNC_OK) {
            status = wsync_cuda_find_unmapped(device, spans, count, &index, &err);
            wsync_cuda_leave(device);
        }
    Py_END_ALLOW_THREADS
    free(spans);
    if (status != WSYNC_OK) {
        (void)wsync_py_raise(state, &err);
        return -1;
    }
    return index < count ? fail_unmapped(state, table, index) : 0;
}

static PyObject *buffers_of(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensors", "owner", NULL};
    ModuleState *state = wsync_py_state(module);
    PyObject *tensors;
    PyObject *owner = Py_None;
    PyObject *owners;
    const TensorTableObject *table;
    BufferTableObject *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|O:of", names,
                                     state->type_TensorTable, &tensors, &owner)) {
        return NULL;
    }
    table = (const TensorTableObject *)tensors;
    if (wsync_py_table_readable(state, table) < 0 || check_mapped(state, table) < 0) {
        return NULL;
    }
    owners = PyTuple_Pack(2, tensors, owner);
    self = owners != NULL ? buffers_alloc(state, (size_t)table->count, owners) : NULL;
    Py_XDECREF(owners);
    if (self != NULL) {
        self->gpu = table->gpu;
    }
    for (Py_ssize_t i = 0; self != NULL && i < table->count; i++) {
        self->spans[i].data = table->rows[i].data;
        self->spans[i].nbytes = table->rows[i].nbytes_spanned;
    }
    return (PyObject *)self;
}

static int buffers_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((BufferTableObject *)object)->owner);
    return 0;
}

static int buffers_clear(PyObject *object)
{
    Py_CLEAR(((BufferTableObject *)object)->owner);
    return 0;
}

static void buffers_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    (void)buffers_clear(object);
    free(((BufferTableObject *)object)->spans);
    wsync_py_free(object);
}

static Py_ssize_t buffers_length(PyObject *object)
{
    return (Py_ssize_t)((BufferTableObject *)object)->count;
}

static PyObject *buffers_item(PyObject *object, Py_ssize_t index)
{
    const BufferTableObject *self = (BufferTableObject *)object;

    if (index < 0 || (size_t)index >= self->count) {
        PyErr_Format(PyExc_IndexError, "buffer %zd of a table of %zu", index, self->count);
        return NULL;
    }
    return Py_BuildValue("(NK)", PyLong_FromVoidPtr(self->spans[index].data),
                         (unsigned long long)self->spans[index].nbytes);
}

static PyType_Slot buffers_slots[] = {
    {Py_tp_doc,
     "BufferTable(spans, owner=None)\n--\n\n"
     "Spans (address, nbytes) that buffer indices stand for while copies run.\n\n"
     "owner is kept alive with the table."},
    {Py_tp_new, buffers_new},
    {Py_tp_dealloc, buffers_dealloc},
    {Py_tp_traverse, buffers_traverse},
    {Py_tp_clear, buffers_clear},
    {Py_sq_length, buffers_length},
    {Py_sq_item, buffers_item},
    {0, NULL},
};

static PyMethodDef buffers_static_methods[] = {
    {"of", WSYNC_PY_KEYWORDS(buffers_of),
     "of(tensors, owner=None)\n--\n\n"
     "Span i covers what tensors[i] describes, and is kept alive with the table.\n\n"
     "StateError names a tensor whose memory on a GPU is not there now."},
    {NULL, NULL, 0, NULL},
};

const wsync_py_type_t wsync_py_type_BufferTable = {
    "wsync._core.BufferTable", sizeof(BufferTableObject),
    Py_TPFLAGS_HAVE_GC,        buffers_slots,
    buffers_static_methods,    NULL};
