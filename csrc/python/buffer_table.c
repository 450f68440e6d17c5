/* SPDX-License-Identifier: Apache-2.0
 * BufferTable: the spans of memory that buffer indices stand for. */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda_lend.h"
#include "python/convert.h"
#include "python/device_types.h"
#include "python/tensor_table.h"

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
    self->id = wsync_py_new_id();
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
        self->resident = device->ordinal >= 0;
    }
    if (self != NULL && count > 0) {
        memcpy(self->spans, spans, count * sizeof(*spans));
    }
    return (PyObject *)self;
}

static int read_span(const void *Py_UNUSED(context), PyObject *item,
                     size_t Py_UNUSED(index), void *made)
{
    wsync_span_t *span = made;

    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "a span is (address, nbytes), not %R", item);
        return -1;
    }
    return PyArg_ParseTuple(item, "O&O&;a span is (address, nbytes)",
                            wsync_py_convert_address, &span->data, wsync_py_convert_u64,
                            &span->nbytes)
               ? 0
               : -1;
}

static PyObject *buffers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"spans", "owner", NULL};
    ModuleState *state = wsync_py_type_state(type);
    PyObject *spans;
    PyObject *owner = Py_None;
    wsync_py_items_t items;
    PyObject *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:BufferTable", names, &spans,
                                     &owner) ||
        wsync_py_items_init(&items, spans, sizeof(wsync_span_t), read_span, NULL) < 0) {
        return NULL;
    }
    self = wsync_py_buffers_create(state, wsync_device_host(), items.items, items.count,
                                   owner);
    wsync_py_items_fini(&items);
    return self;
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

/* Finds what the tensors on a GPU lie in.  A thread that reads what is not there ends the
 * process, and a device its context. */
static int find_ranges(ModuleState *state, const TensorTableObject *table,
                       wsync_cuda_ranges_t *ranges)
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
            status = wsync_cuda_find_ranges(device, spans, count, ranges, &index, &err);
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
    static char *names[] = {"tensors", "owner", "ask", NULL};
    ModuleState *state = wsync_py_state(module);
    PyObject *tensors;
    PyObject *owner = Py_None;
    PyObject *owners;
    int ask = 1;
    const TensorTableObject *table;
    BufferTableObject *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|Op:of", names,
                                     state->type_TensorTable, &tensors, &owner, &ask)) {
        return NULL;
    }
    table = (const TensorTableObject *)tensors;
    if (wsync_py_table_readable(state, table) < 0) {
        return NULL;
    }
    owners = PyTuple_Pack(2, tensors, owner);
    self = owners != NULL ? buffers_alloc(state, (size_t)table->count, owners) : NULL;
    Py_XDECREF(owners);
    if (self == NULL || (ask && find_ranges(state, table, &self->ranges) < 0)) {
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    self->gpu = table->gpu;
    self->resident = table->gpu >= 0;
    for (Py_ssize_t i = 0; i < table->count; i++) {
        self->resident &= table->rows[i].on_gpu;
        self->spans[i].data = table->rows[i].data;
        self->spans[i].nbytes = table->rows[i].nbytes_spanned;
    }
    return (PyObject *)self;
}

/* --- what of it can be lent ------------------------------------------------------------
 */

static PyObject *wrap_allocations(const wsync_cuda_allocation_t *items, size_t count)
{
    PyObject *list = PyList_New(0);

    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = Py_BuildValue(
            "(KKKO)", items[i].at, (unsigned long long)items[i].nbytes,
            (unsigned long long)items[i].identity, items[i].piece ? Py_True : Py_False);

        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *buffers_allocations(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const BufferTableObject *self = (BufferTableObject *)object;
    const wsync_cuda_device_t *device = NULL;
    wsync_cuda_allocation_t *items = NULL;
    PyObject *list = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (self->gpu < 0) {
        return PyList_New(0);
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_cuda_device(self->gpu, &device, &err);
        if (status == WSYNC_OK) {
            status = wsync_cuda_enter(device, &err);
        }
        if (status == WSYNC_OK) {
            status = wsync_cuda_identify(device, &self->ranges, &items, &err);
            wsync_cuda_leave(device);
        }
    Py_END_ALLOW_THREADS
    list = status == WSYNC_OK ? wrap_allocations(items, self->ranges.count)
                              : wsync_py_raise(wsync_py_state_of(object), &err);
    free(items);
    return list;
}

/* Allocations of cuMemAlloc, which nobody can unmap. */
static PyObject *buffers_malloced(PyObject *object, void *Py_UNUSED(closure))
{
    const wsync_cuda_ranges_t *ranges = &((BufferTableObject *)object)->ranges;
    bool malloced = true;

    for (size_t i = 0; i < ranges->count; i++) {
        malloced &= ranges->items[i].legacy;
    }
    return PyBool_FromLong(malloced);
}

static PyObject *buffers_spans(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const BufferTableObject *self = (BufferTableObject *)object;

    return PyBytes_FromStringAndSize((const char *)self->spans,
                                     (Py_ssize_t)(self->count * sizeof(*self->spans)));
}

/* Reads what buffers_allocations has given. */
static int read_allocation(const void *Py_UNUSED(context), PyObject *item,
                           size_t Py_UNUSED(index), void *made)
{
    wsync_cuda_allocation_t *allocation = made;
    uint64_t at;
    int piece;

    if (!PyArg_ParseTuple(item, "O&O&O&p:lend", wsync_py_convert_u64, &at,
                          wsync_py_convert_u64, &allocation->nbytes, wsync_py_convert_u64,
                          &allocation->identity, &piece)) {
        return -1;
    }
    allocation->at = at;
    allocation->piece = piece != 0;
    return 0;
}

static PyObject *buffers_lend(PyObject *object, PyObject *argument)
{
    const BufferTableObject *self = (BufferTableObject *)object;
    ModuleState *state = wsync_py_state_of(object);
    const wsync_cuda_device_t *device = NULL;
    wsync_memory_t *memory = NULL;
    wsync_py_items_t items;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (self->gpu < 0) {
        return wsync_py_fail(state, WSYNC_ERR_INVALID, "BufferTable",
                             "lend: no buffer of the table is on a GPU");
    }
    if (wsync_py_items_init(&items, argument, sizeof(wsync_cuda_allocation_t),
                            read_allocation, NULL) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_cuda_device(self->gpu, &device, &err);
        if (status == WSYNC_OK) {
            status = wsync_cuda_lend(device, items.items, items.count, &memory, &err);
        }
    Py_END_ALLOW_THREADS
    wsync_py_items_fini(&items);
    return status == WSYNC_OK ? wsync_py_memory_wrap(state, memory)
                              : wsync_py_raise(state, &err);
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
    free(((BufferTableObject *)object)->ranges.items);
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
        return PyErr_Format(PyExc_IndexError, "buffer %zd is out of range (%zu in all)",
                            index, self->count);
    }
    return Py_BuildValue("(NK)", PyLong_FromVoidPtr(self->spans[index].data),
                         (unsigned long long)self->spans[index].nbytes);
}

static PyMethodDef buffers_methods[] = {
    {"allocations", buffers_allocations, METH_NOARGS, "allocations($self, /)\n--\n\n"},
    {"lend", buffers_lend, METH_O, "lend($self, allocations, /)\n--\n\n"},
    {"spans", buffers_spans, METH_NOARGS, "spans($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef buffers_getset[] = {
    {"malloced", buffers_malloced, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot buffers_slots[] = {
    {Py_tp_doc, "BufferTable(spans, owner=None)\n--\n\n"},
    {Py_tp_new, buffers_new},
    {Py_tp_dealloc, buffers_dealloc},
    {Py_tp_traverse, buffers_traverse},
    {Py_tp_clear, buffers_clear},
    {Py_tp_methods, buffers_methods},
    {Py_tp_getset, buffers_getset},
    {Py_sq_length, buffers_length},
    {Py_sq_item, buffers_item},
    {0, NULL},
};

static PyMethodDef buffers_static_methods[] = {
    {"of", WSYNC_PY_KEYWORDS(buffers_of), "of(tensors, owner=None, ask=True)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

const wsync_py_type_t wsync_py_type_BufferTable = {
    "wsync._core.BufferTable", sizeof(BufferTableObject),
    Py_TPFLAGS_HAVE_GC,        buffers_slots,
    buffers_static_methods,    NULL};
