/* SPDX-License-Identifier: Apache-2.0
 * Layout: an immutable layout and its bytes. */
#include "python/layout.h"

#include <stdlib.h>

#include "core/layout/encoding.h"
#include "core/layout/join.h"
#include "core/write_overlap.h"
#include "python/convert.h"
#include "python/device_types.h"

PyObject *wsync_py_layout_new(ModuleState *state, wsync_layout_t *layout)
{
    PyTypeObject *type = state->type_Layout;
    LayoutObject *object = (LayoutObject *)wsync_py_alloc(type);

    if (object == NULL) {
        wsync_layout_destroy(layout);
        return NULL;
    }
    object->layout = layout;
    return (PyObject *)object;
}

static wsync_layout_t *layout_of(PyObject *self)
{
    return ((LayoutObject *)self)->layout;
}

static void layout_dealloc(PyObject *self)
{
    wsync_layout_destroy(layout_of(self));
    wsync_py_free(self);
}

static PyObject *layout_from_bytes(PyObject *module, PyObject *data)
{
    ModuleState *state = wsync_py_state(module);
    char *bytes;
    Py_ssize_t nbytes;
    wsync_layout_t *layout = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;

    /* Bytes alone: nobody can change them while they are parsed without the GIL. */
    if (PyBytes_AsStringAndSize(data, &bytes, &nbytes) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_layout_decode((const uint8_t *)bytes, (size_t)nbytes, &layout, &err);
    Py_END_ALLOW_THREADS
    return status == WSYNC_OK ? wsync_py_layout_new(state, layout)
                              : wsync_py_raise(state, &err);
}

static int read_layout(const void *context, PyObject *object, size_t index, void *item)
{
    const ModuleState *state = context;

    (void)index;
    if (wsync_py_check_type(object, state->type_Layout, "a layout") < 0) {
        return -1;
    }
    *(const wsync_layout_t **)item = ((LayoutObject *)object)->layout;
    return 0;
}

static PyObject *layout_merge(PyObject *module, PyObject *sequence)
{
    ModuleState *state = wsync_py_state(module);
    wsync_py_items_t layouts;
    wsync_layout_t *merged = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (wsync_py_items_init(&layouts, sequence, sizeof(const wsync_layout_t *), read_layout,
                            state) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_layout_merge((const wsync_layout_t *const *)layouts.items,
                                    layouts.count, &merged, &err);
    Py_END_ALLOW_THREADS
    wsync_py_items_fini(&layouts);
    return status == WSYNC_OK ? wsync_py_layout_new(state, merged)
                              : wsync_py_raise(state, &err);
}

static int check_lent(ModuleState *state, const wsync_layout_t *layout, Py_ssize_t given)
{
    wsync_error_t err = {0};
    uint32_t count;

    if (wsync_layout_count_buffers(layout, &count, &err) != WSYNC_OK) {
        (void)wsync_py_raise(state, &err);
        return -1;
    }
    if ((size_t)given != count) {
        PyErr_Format(PyExc_ValueError,
                     "join: lent has %zd bytes, but there are %lu buffers", given,
                     (unsigned long)count);
        return -1;
    }
    return 0;
}

static PyObject *layout_join(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"wanted", "lent", NULL};
    ModuleState *state = wsync_py_state_of(self);
    PyObject *wanted = Py_None;
    PyObject *lent = NULL;
    const wsync_layout_t *chosen;
    const uint8_t *bytes;
    wsync_layout_t *joined = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OS:join", keywords, &wanted, &lent)) {
        return NULL;
    }
    if (wanted != Py_None &&
        wsync_py_check_type(wanted, state->type_Layout, "wanted") < 0) {
        return NULL;
    }
    if (lent != NULL && check_lent(state, layout_of(self), PyBytes_Size(lent)) < 0) {
        return NULL;
    }
    chosen = wanted != Py_None ? layout_of(wanted) : NULL;
    bytes = lent != NULL ? (const uint8_t *)PyBytes_AsString(lent) : NULL;
    Py_BEGIN_ALLOW_THREADS
        status = wsync_layout_join(layout_of(self), chosen, bytes, &joined, &err);
    Py_END_ALLOW_THREADS
    return status == WSYNC_OK ? wsync_py_layout_new(state, joined)
                              : wsync_py_raise(state, &err);
}

static PyObject *layout_without(PyObject *self, PyObject *other)
{
    ModuleState *state = wsync_py_state_of(self);
    wsync_layout_t *rest = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (wsync_py_check_type(other, state->type_Layout, "other") < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_layout_without(layout_of(self), layout_of(other), &rest, &err);
    Py_END_ALLOW_THREADS
    return status == WSYNC_OK ? wsync_py_layout_new(state, rest)
                              : wsync_py_raise(state, &err);
}

static PyObject *layout_beside(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"other", "first", NULL};
    ModuleState *state = wsync_py_state_of(self);
    PyObject *other;
    long long value;
    uint32_t first;
    wsync_layout_t *both = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!L:beside", keywords,
                                     state->type_Layout, &other, &value) ||
        wsync_py_read_u32(value, "first", &first) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_layout_beside(layout_of(self), layout_of(other), first, &both, &err);
    Py_END_ALLOW_THREADS
    return status == WSYNC_OK ? wsync_py_layout_new(state, both)
                              : wsync_py_raise(state, &err);
}

static PyObject *layout_to_bytes(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    const wsync_layout_t *layout = layout_of(self);
    PyObject *result = NULL;
    uint8_t *data = NULL;
    size_t nbytes = 0;
    wsync_error_t err = {0};
    wsync_status_t status;

    Py_BEGIN_ALLOW_THREADS
        status = wsync_layout_encode(layout, &data, &nbytes, &err);
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        return wsync_py_raise(wsync_py_state_of(self), &err);
    }
    result = PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)nbytes);
    free(data);
    return result;
}

static PyObject *layout_names(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    const wsync_layout_t *layout = layout_of(self);
    const size_t count = wsync_layout_tensor_count(layout);
    PyObject *list = PyList_New((Py_ssize_t)count);

    for (size_t i = 0; list != NULL && i < count; i++) {
        wsync_py_list_put(&list, i,
                          PyUnicode_FromString(wsync_layout_tensor(layout, i)->name));
    }
    return list;
}

/* The tensor of an index, or NULL with IndexError. */
static const wsync_tensor_t *find_tensor(PyObject *self, PyObject *object, size_t *index)
{
    const wsync_layout_t *layout = layout_of(self);

    return wsync_py_read_index(object, wsync_layout_tensor_count(layout), "tensor",
                               index) == 0
               ? wsync_layout_tensor(layout, *index)
               : NULL;
}

static PyObject *layout_tensor(PyObject *self, PyObject *object)
{
    size_t index;
    const wsync_tensor_t *tensor = find_tensor(self, object, &index);

    if (tensor == NULL) {
        return NULL;
    }
    return wsync_py_record(
        wsync_py_state_of(self)->record_TensorInfo,
        Py_BuildValue("ssNI", tensor->name, wsync_dtype_name(tensor->dtype),
                      wsync_py_int64_tuple(tensor->shape, tensor->ndim), tensor->group));
}

static PyObject *layout_shards(PyObject *self, PyObject *object)
{
    const wsync_layout_t *layout = layout_of(self);
    size_t index;
    size_t count;
    const wsync_shard_t *shards;
    const wsync_tensor_t *tensor = find_tensor(self, object, &index);
    PyObject *list;

    if (tensor == NULL) {
        return NULL;
    }
    shards = wsync_layout_shards(layout, index, &count);
    list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        const wsync_shard_t *shard = &shards[i];
        int64_t step[WSYNC_MAX_NDIM];
        PyObject *item;

        for (unsigned j = 0; j < WSYNC_MAX_NDIM; j++) {
            step[j] = shard->step[j];
        }
        item = wsync_py_record(
            wsync_py_state_of(self)->record_Shard,
            Py_BuildValue("IIKNNNs(ff)N", shard->rank, shard->buffer,
                          (unsigned long long)shard->offset,
                          wsync_py_int64_tuple(shard->box.start, tensor->ndim),
                          wsync_py_int64_tuple(shard->box.extent, tensor->ndim),
                          wsync_py_int64_tuple(shard->stride, tensor->ndim),
                          wsync_layout_origin(layout, shard->origin),
                          (double)shard->affine.scale, (double)shard->affine.offset,
                          wsync_py_int64_tuple(step, tensor->ndim)));

        wsync_py_list_put(&list, i, item);
    }
    return list;
}

static PyObject *layout_buffer_count(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"rank", NULL};
    long long value = 0;
    uint32_t rank;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|L:buffer_count", keywords, &value) ||
        wsync_py_read_u32(value, "rank", &rank) < 0) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(wsync_layout_buffer_count(layout_of(self), rank));
}

static PyObject *layout_check_apart(PyObject *self, PyObject *buffers)
{
    ModuleState *state = wsync_py_state_of(self);
    const BufferTableObject *table = (const BufferTableObject *)buffers;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (wsync_py_check_type(buffers, state->type_BufferTable, "buffers") < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status =
            wsync_layout_check_apart(layout_of(self), table->spans, table->count, &err);
    Py_END_ALLOW_THREADS
    return wsync_py_none(state, status, &err);
}

WSYNC_PY_NUMBER_GETTER(layout_tensor_count, wsync_layout_tensor_count(layout_of(self)))
WSYNC_PY_NUMBER_GETTER(layout_shard_count, wsync_layout_shard_count(layout_of(self)))
WSYNC_PY_NUMBER_GETTER(layout_rank_count, wsync_layout_rank_count(layout_of(self)))
WSYNC_PY_NUMBER_GETTER(layout_nbytes, wsync_layout_nbytes(layout_of(self)))
WSYNC_PY_NUMBER_GETTER(layout_shard_nbytes, wsync_layout_shard_nbytes(layout_of(self)))

static PyMethodDef layout_methods[] = {
    {"to_bytes", layout_to_bytes, METH_NOARGS, "to_bytes($self)\n--\n\n"},
    {"names", layout_names, METH_NOARGS, "names($self)\n--\n\n"},
    {"tensor", layout_tensor, METH_O, "tensor($self, index, /)\n--\n\n"},
    {"shards", layout_shards, METH_O, "shards($self, index, /)\n--\n\n"},
    {"join", WSYNC_PY_KEYWORDS(layout_join), "join($self, wanted=None, lent=...)\n--\n\n"},
    {"without", layout_without, METH_O, "without($self, other, /)\n--\n\n"},
    {"beside", WSYNC_PY_KEYWORDS(layout_beside), "beside($self, other, first)\n--\n\n"},
    {"buffer_count", WSYNC_PY_KEYWORDS(layout_buffer_count),
     "buffer_count($self, rank=0)\n--\n\n"},
    {"check_apart", layout_check_apart, METH_O, "check_apart($self, buffers, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef layout_getset[] = {
    {"tensor_count", layout_tensor_count, NULL, NULL, NULL},
    {"shard_count", layout_shard_count, NULL, NULL, NULL},
    {"rank_count", layout_rank_count, NULL, NULL, NULL},
    {"nbytes", layout_nbytes, NULL, NULL, NULL},
    {"shard_nbytes", layout_shard_nbytes, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot layout_slots[] = {
    {Py_tp_dealloc, layout_dealloc},
    {Py_tp_methods, layout_methods},
    {Py_tp_getset, layout_getset},
    {0, NULL},
};

static PyMethodDef layout_static_methods[] = {
    {"from_bytes", layout_from_bytes, METH_O, "from_bytes(data, /)\n--\n\n"},
    {"merge", layout_merge, METH_O, "merge(layouts, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

const wsync_py_type_t wsync_py_type_Layout = {
    "wsync._core.Layout", sizeof(LayoutObject),  Py_TPFLAGS_DISALLOW_INSTANTIATION,
    layout_slots,         layout_static_methods, NULL};
