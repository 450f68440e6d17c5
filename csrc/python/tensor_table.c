/* SPDX-License-Identifier: Apache-2.0
 * TensorTable, DLPack's dtypes, and where to find its C exchange API. */
#include "python/tensor_table.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "python/convert.h"

enum { MAX_ALIGNMENT = 4096 };

static const char exchange_capsule[] = "dlpack_exchange_api";

const DLPackExchangeAPI *wsync_py_exchange_api(ModuleState *state, PyObject *tensor)
{
    PyObject *capsule = PyObject_GetAttr((PyObject *)Py_TYPE(tensor),
                                         state->name___dlpack_c_exchange_api__);
    const DLPackExchangeAPIHeader *header =
        capsule != NULL ? PyCapsule_GetPointer(capsule, exchange_capsule) : NULL;

    PyErr_Clear();
    Py_XDECREF(capsule); /* the type keeps it */
    return header != NULL && header->version.major == DLPACK_MAJOR_VERSION
               ? (const DLPackExchangeAPI *)header
               : NULL;
}

static const DLDataType dlpack_dtypes[WSYNC_DTYPE_COUNT] = {
    [WSYNC_DTYPE_FLOAT64] = {kDLFloat, 64, 1},
    [WSYNC_DTYPE_FLOAT32] = {kDLFloat, 32, 1},
    [WSYNC_DTYPE_FLOAT16] = {kDLFloat, 16, 1},
    [WSYNC_DTYPE_BFLOAT16] = {kDLBfloat, 16, 1},
    [WSYNC_DTYPE_FLOAT8_E4M3FN] = {kDLFloat8_e4m3fn, 8, 1},
    [WSYNC_DTYPE_FLOAT8_E4M3FNUZ] = {kDLFloat8_e4m3fnuz, 8, 1},
    [WSYNC_DTYPE_FLOAT8_E5M2] = {kDLFloat8_e5m2, 8, 1},
    [WSYNC_DTYPE_FLOAT8_E5M2FNUZ] = {kDLFloat8_e5m2fnuz, 8, 1},
    [WSYNC_DTYPE_FLOAT8_E8M0FNU] = {kDLFloat8_e8m0fnu, 8, 1},
    [WSYNC_DTYPE_FLOAT4_E2M1FN_X2] = {kDLFloat4_e2m1fn, 4, 2},
    [WSYNC_DTYPE_INT64] = {kDLInt, 64, 1},
    [WSYNC_DTYPE_INT32] = {kDLInt, 32, 1},
    [WSYNC_DTYPE_INT16] = {kDLInt, 16, 1},
    [WSYNC_DTYPE_INT8] = {kDLInt, 8, 1},
    [WSYNC_DTYPE_UINT64] = {kDLUInt, 64, 1},
    [WSYNC_DTYPE_UINT32] = {kDLUInt, 32, 1},
    [WSYNC_DTYPE_UINT16] = {kDLUInt, 16, 1},
    [WSYNC_DTYPE_UINT8] = {kDLUInt, 8, 1},
    [WSYNC_DTYPE_BOOL] = {kDLBool, 8, 1},
    [WSYNC_DTYPE_COMPLEX64] = {kDLComplex, 64, 1},
    [WSYNC_DTYPE_COMPLEX128] = {kDLComplex, 128, 1},
};

bool wsync_py_is_dtype(DLDataType described, wsync_dtype_t dtype)
{
    const DLDataType known = dlpack_dtypes[dtype];

    return described.code == known.code && described.bits == known.bits &&
           described.lanes == known.lanes;
}

/* --- TensorTable ---------------------------------------------------------------------- */

static int table_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((TensorTableObject *)self)->owners);
    return 0;
}

static int table_clear(PyObject *self)
{
    ((TensorTableObject *)self)->count = 0; /* the rows point to nothing from here on */
    Py_CLEAR(((TensorTableObject *)self)->owners);
    return 0;
}

static void table_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    (void)table_clear(self);
    free(((TensorTableObject *)self)->rows);
    Py_XDECREF(((TensorTableObject *)self)->names);
    wsync_py_free(self);
}

static Py_ssize_t table_length(PyObject *self)
{
    return ((TensorTableObject *)self)->count;
}

static PyObject *table_item(PyObject *self, Py_ssize_t index)
{
    const TensorTableObject *table = (TensorTableObject *)self;
    const wsync_tensor_row_t *row = NULL;
    PyObject *address = NULL;

    if (index < 0 || index >= table->count) {
        return PyErr_Format(PyExc_IndexError, "tensor %zd is out of range (%zd in all)",
                            index, table->count);
    }
    row = &table->rows[index];
    address = PyLong_FromVoidPtr(row->data);
    if (address == NULL) {
        return NULL;
    }
    return Py_BuildValue("NsNNK", address, wsync_dtype_name(row->dtype),
                         wsync_py_int64_tuple(row->shape, row->ndim),
                         wsync_py_int64_tuple(row->stride, row->ndim),
                         (unsigned long long)row->nbytes_spanned);
}

WSYNC_PY_NUMBER_GETTER(table_nbytes, ((TensorTableObject *)self)->nbytes)

static PyObject *table_offsets(PyObject *self, PyObject *args)
{
    const TensorTableObject *table = (TensorTableObject *)self;
    uint64_t alignment = 0;
    uint64_t end = 0;
    PyObject *starts = NULL;

    if (!PyArg_ParseTuple(args, "O&:offsets", wsync_py_convert_u64, &alignment)) {
        return NULL;
    }
    if (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment > MAX_ALIGNMENT) {
        return wsync_py_fail(wsync_py_state_of(self), WSYNC_ERR_INVALID, "offsets",
                             "alignment %llu is not a power of two up to %d",
                             (unsigned long long)alignment, (int)MAX_ALIGNMENT);
    }
    starts = PyList_New(table->count);
    for (Py_ssize_t i = 0; starts != NULL && i < table->count; i++) {
        uint64_t start = 0;

        /* broadcast dimensions make rows of any size out of little memory */
        if (__builtin_add_overflow(end, alignment - 1, &start) ||
            __builtin_add_overflow(start & ~(alignment - 1), table->rows[i].nbytes, &end)) {
            PyErr_SetString(PyExc_OverflowError, "more than 2^64 bytes of tensors");
            Py_CLEAR(starts);
            break;
        }
        wsync_py_list_put(&starts, (size_t)i,
                          PyLong_FromUnsignedLongLong(start & ~(alignment - 1)));
    }
    return starts != NULL ? Py_BuildValue("NK", starts, (unsigned long long)end) : NULL;
}

bool wsync_py_same_form(const wsync_tensor_row_t *one, const wsync_tensor_row_t *other)
{
    return one->dtype == other->dtype && one->ndim == other->ndim &&
           memcmp(one->shape, other->shape, sizeof(one->shape)) == 0 &&
           memcmp(one->stride, other->stride, sizeof(one->stride)) == 0;
}

static PyObject *table_differs(PyObject *self, PyObject *object)
{
    const TensorTableObject *table = (TensorTableObject *)self;
    const TensorTableObject *other = (TensorTableObject *)object;
    Py_ssize_t count;

    if (wsync_py_check_type(object, Py_TYPE(self), "other") < 0) {
        return NULL;
    }
    count = table->count < other->count ? table->count : other->count;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!wsync_py_same_form(&table->rows[i], &other->rows[i])) {
            return PyLong_FromSsize_t(i);
        }
    }
    if (table->count != other->count) {
        return PyLong_FromSsize_t(count);
    }
    Py_RETURN_NONE;
}

static PyObject *table_form(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    const TensorTableObject *table = (TensorTableObject *)self;
    TensorTableObject *form = wsync_py_table_new(wsync_py_state_of(self), table->count);

    if (form != NULL) {
        memcpy(form->rows, table->rows, (size_t)table->count * sizeof(*form->rows));
        form->nbytes = table->nbytes;
        form->gpu = table->gpu;
    }
    return (PyObject *)form;
}

int wsync_py_table_readable(ModuleState *state, const TensorTableObject *table)
{
    if (table->owners != NULL) {
        return 0;
    }
    (void)wsync_py_fail(state, WSYNC_ERR_INVALID, "TensorTable",
                        "a table's form() cannot be read: it does not keep the tensors");
    return -1;
}

static PyObject *join(PyObject *one, PyObject *other)
{
    return one != NULL && other != NULL ? PySequence_Concat(one, other) : NULL;
}

static PyObject *table_joined(PyObject *self, PyObject *object)
{
    ModuleState *state = wsync_py_state_of(self);
    const TensorTableObject *one = (TensorTableObject *)self;
    const TensorTableObject *other = (TensorTableObject *)object;
    TensorTableObject *joined;

    if (wsync_py_check_type(object, Py_TYPE(self), "other") < 0) {
        return NULL;
    }
    if (wsync_py_table_readable(state, one) < 0 ||
        wsync_py_table_readable(state, other) < 0) {
        return NULL;
    }
    if (one->gpu >= 0 && other->gpu >= 0 && one->gpu != other->gpu) {
        return wsync_py_fail(state, WSYNC_ERR_INVALID, "TensorTable",
                             "one table cannot have tensors of GPU %d and of GPU %d",
                             one->gpu, other->gpu);
    }
    joined = wsync_py_table_new(state, one->count + other->count);
    if (joined == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < joined->count; i++) {
        joined->rows[i] = i < one->count ? one->rows[i] : other->rows[i - one->count];
    }
    joined->nbytes = one->nbytes + other->nbytes;
    joined->gpu = one->gpu >= 0 ? one->gpu : other->gpu;
    joined->names = join(one->names, other->names);
    joined->owners = PySequence_Concat(one->owners, other->owners);
    if (PyErr_Occurred() != NULL) {
        Py_DECREF((PyObject *)joined);
        return NULL;
    }
    return (PyObject *)joined;
}

static PyMethodDef table_methods[] = {
    {"joined", table_joined, METH_O, "joined($self, other, /)\n--\n\n"},
    {"form", table_form, METH_NOARGS, "form($self)\n--\n\n"},
    {"differs", table_differs, METH_O, "differs($self, other, /)\n--\n\n"},
    {"moved", wsync_py_table_moved, METH_O, "moved($self, tensors, /)\n--\n\n"},
    {"offsets", table_offsets, METH_VARARGS, "offsets($self, alignment, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyObject *table_gpu(PyObject *self, void *Py_UNUSED(closure))
{
    const int gpu = ((TensorTableObject *)self)->gpu;

    if (gpu < 0) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLong(gpu);
}

static PyObject *table_known(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((TensorTableObject *)self)->known);
}

static PyGetSetDef table_getset[] = {
    {"known", table_known, NULL, NULL, NULL},
    {"nbytes", table_nbytes, NULL, NULL, NULL},
    {"gpu", table_gpu, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_dealloc, table_dealloc}, {Py_tp_traverse, table_traverse},
    {Py_tp_clear, table_clear},     {Py_tp_methods, table_methods},
    {Py_tp_getset, table_getset},   {Py_sq_length, table_length},
    {Py_sq_item, table_item},       {0, NULL},
};

const wsync_py_type_t wsync_py_type_TensorTable = {
    "wsync._core.TensorTable",
    sizeof(TensorTableObject),
    Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    table_slots,
    NULL,
    NULL};

TensorTableObject *wsync_py_table_new(ModuleState *state, Py_ssize_t count)
{
    TensorTableObject *table = (TensorTableObject *)wsync_py_alloc(state->type_TensorTable);

    if (table == NULL) {
        return NULL;
    }
    table->rows = calloc((size_t)count + 1, sizeof(*table->rows));
    if (table->rows == NULL) {
        Py_DECREF((PyObject *)table);
        return (TensorTableObject *)PyErr_NoMemory();
    }
    table->count = count;
    table->gpu = -1;
    return table;
}
