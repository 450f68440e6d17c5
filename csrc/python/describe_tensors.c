/* SPDX-License-Identifier: Apache-2.0
 * describe(): reads where torch tensors lie, without copying.  Each is asked one question,
 * by DLPack's C exchange API; only of an answer that is not as it was more is asked. */
#include "python/tensor_table.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "python/convert.h"

/* --- what one call of describe() carries along ---------------------------------------- */

typedef struct describer {
    ModuleState *state;
    PyObject *names;    /* borrowed tuple or NULL */
    PyObject *owners;   /* borrowed from the table: the tensors, and what they lie in; NULL:
                         * what is read is compared at once, and nothing has to be kept */
    PyTypeObject *type; /* borrowed: the type that `api` belongs to */
    const DLPackExchangeAPI *api;
    Py_ssize_t index; /* of the tensor at hand */
    int gpu_ok;       /* whether tensors may lie on a GPU */
    int64_t gpu;      /* that they lie on; -1: none has so far */
} describer_t;

/* Raises "<name> (<type>): <what>" for one tensor; drops an exception that is set. */
__attribute__((format(printf, 4, 5))) static int fail_tensor(const describer_t *describer,
                                                             PyObject *tensor,
                                                             wsync_status_t status,
                                                             const char *format, ...)
{
    char what[WSYNC_ERROR_MESSAGE_NBYTES];
    PyObject *name = NULL;
    PyObject *type;
    const char *name_text = NULL;
    const char *type_text;
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(what, sizeof(what), format, arguments);
    va_end(arguments);
    PyErr_Clear();
    type = PyType_GetName(Py_TYPE(tensor));
    type_text = type != NULL ? PyUnicode_AsUTF8AndSize(type, NULL) : NULL;
    if (type_text == NULL) {
        Py_XDECREF(type);
        return -1;
    }
    name = describer->names != NULL
               ? PyObject_Str(PyTuple_GetItem(describer->names, describer->index))
               : PyUnicode_FromFormat("tensor %zd", describer->index);
    name_text = name != NULL ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    if (name_text != NULL && type_text != NULL) {
        (void)wsync_py_fail(describer->state, status, "describe", "%s (%s): %s", name_text,
                            type_text, what);
    }
    Py_XDECREF(name);
    Py_XDECREF(type);
    return -1;
}

/* str() of an attribute, for messages; NULL without an exception where there is none. */
static PyObject *attribute_text(PyObject *tensor, const char *name)
{
    PyObject *attribute = PyObject_GetAttrString(tensor, name);
    PyObject *text = attribute != NULL ? PyObject_Str(attribute) : NULL;

    Py_XDECREF(attribute);
    if (text == NULL || PyUnicode_AsUTF8AndSize(text, NULL) == NULL) {
        Py_CLEAR(text);
        PyErr_Clear();
    }
    return text;
}

/* Turns the exception that is set into UnsupportedError that names the tensor. */
static int fail_with_cause(const describer_t *describer, PyObject *tensor)
{
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyObject *text = NULL;
    const char *cause = NULL;
    int length = 0;

    if (PyErr_ExceptionMatches(PyExc_MemoryError) ||
        !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_Fetch(&type, &value, &traceback);
    text = value != NULL ? PyObject_Str(value) : NULL;
    cause = text != NULL ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    if (cause == NULL) {
        cause = "no reason given";
    }
    length = (int)strcspn(cause, "\n"); /* torch appends pages of hints */
    (void)fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                      "torch does not tell where its elements lie: %.*s", length, cause);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return -1;
}

/* --- shape, strides and address ------------------------------------------------------- */

/* Gives the strides that mean nothing, of dimensions of extent 1 and of tensors without
 * elements, the values that they have in contiguous memory: torch lets any stand there, and
 * rows are compared. */
static bool settle_strides(wsync_tensor_row_t *row, bool empty)
{
    int64_t contiguous = 1;
    bool overflow = false;

    for (uint32_t i = row->ndim; i-- > 0;) {
        if (empty || row->shape[i] == 1) {
            row->stride[i] = contiguous;
        }
        overflow |= __builtin_mul_overflow(contiguous, row->shape[i], &contiguous);
    }
    return !overflow;
}

/* Fills the sizes of a row whose data, dtype, ndim, shape and stride are set. */
static int finish_row(const describer_t *describer, PyObject *tensor,
                      wsync_tensor_row_t *row)
{
    const int64_t item = (int64_t)wsync_dtype_nbytes(row->dtype);
    int64_t count = 1;
    int64_t last = 0; /* element index of the last element */
    int64_t nbytes = 0;
    int64_t spanned = 0;
    bool overflow = false;

    for (uint32_t i = row->ndim; i < WSYNC_MAX_NDIM; i++) {
        row->shape[i] = 1;
        row->stride[i] = 0;
    }
    for (uint32_t i = 0; i < row->ndim; i++) {
        int64_t reach = 0;

        overflow |= __builtin_mul_overflow(count, row->shape[i], &count);
        overflow |= row->shape[i] > 0 &&
                    __builtin_mul_overflow(row->shape[i] - 1, row->stride[i], &reach);
        overflow |= __builtin_add_overflow(last, reach, &last);
    }
    if (!overflow && count > 0) {
        overflow = last == INT64_MAX || __builtin_mul_overflow(last + 1, item, &spanned) ||
                   __builtin_mul_overflow(count, item, &nbytes);
    }
    if (overflow || !settle_strides(row, count == 0)) {
        return fail_tensor(describer, tensor, WSYNC_ERR_INVALID,
                           "shape and strides span more than 2^63 bytes");
    }
    row->nbytes = (uint64_t)nbytes;
    row->nbytes_spanned = (uint64_t)spanned;
    return 0;
}

static int fail_dtype(const describer_t *describer, PyObject *tensor)
{
    PyObject *text = attribute_text(tensor, "dtype");
    const char *name = text != NULL ? PyUnicode_AsUTF8AndSize(text, NULL) : "(unknown)";

    (void)fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                      "dtype %.64s is not supported", name);
    Py_XDECREF(text);
    return -1;
}

static int fail_device(const describer_t *describer, PyObject *tensor)
{
    PyObject *text = attribute_text(tensor, "device");
    const char *name = text != NULL ? PyUnicode_AsUTF8AndSize(text, NULL) : "(unknown)";

    if (describer->gpu >= 0) {
        (void)fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                          "is on device %.64s, and other tensors are on cuda:%lld; all "
                          "must be on one device",
                          name, (long long)describer->gpu);
    } else {
        (void)fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                          "is on device %.64s, but wsync takes only %s here", name,
                          describer->gpu_ok ? "CPU or CUDA memory" : "CPU memory");
    }
    Py_XDECREF(text);
    return -1;
}

/* Whether elements on a CUDA device can be described: all such lie on the same one. */
static bool take_gpu(describer_t *describer, int64_t ordinal)
{
    if (!describer->gpu_ok || ordinal < 0 ||
        (describer->gpu >= 0 && describer->gpu != ordinal)) {
        return false;
    }
    describer->gpu = ordinal;
    return true;
}

/* The exchange API of a tensor's type, which may be that of the tensor before it; NULL with
 * an exception. */
static const DLPackExchangeAPI *find_api(describer_t *describer, PyObject *tensor)
{
    if (Py_TYPE(tensor) != describer->type) {
        describer->api = wsync_py_exchange_api(describer->state, tensor);
        describer->type = Py_TYPE(tensor);
    }
    if (describer->api == NULL) {
        (void)fail_tensor(describer, tensor, WSYNC_ERR_INVALID,
                          "not a torch tensor (of torch 2.10 or newer)");
    }
    return describer->api;
}

/* Has the table own the storage of a tensor that is read: the tensor may get another one
 * (x.data = y) while copies run. */
static int hold_storage(const describer_t *describer, PyObject *tensor)
{
    PyObject *storage =
        PyObject_CallMethodObjArgs(tensor, describer->state->name_untyped_storage, NULL);
    const int result = storage != NULL ? PyList_Append(describer->owners, storage)
                                       : fail_with_cause(describer, tensor);

    Py_XDECREF(storage);
    return result;
}

/* Fills a row by what DLPack says.  `data` may be NULL: torch gives wrappers no address. */
static int read_plain(describer_t *describer, PyObject *tensor, wsync_tensor_row_t *row)
{
    const DLPackExchangeAPI *api = find_api(describer, tensor);
    DLTensor view; /* shape and strides are borrowed from the tensor: copy them at once */

    if (api == NULL) {
        return -1;
    }
    if (api->dltensor_from_py_object_no_sync(tensor, &view) != 0) {
        return fail_with_cause(describer, tensor);
    }
    while (row->dtype < WSYNC_DTYPE_COUNT && !wsync_py_is_dtype(view.dtype, row->dtype)) {
        row->dtype++;
    }
    if (row->dtype == WSYNC_DTYPE_COUNT) {
        return fail_dtype(describer, tensor);
    }
    row->on_gpu = view.device.device_type == kDLCUDA;
    if (row->on_gpu
            ? !take_gpu(describer, view.device.device_id)
            : view.device.device_type != kDLCPU && view.device.device_type != kDLCUDAHost) {
        return fail_device(describer, tensor);
    }
    if (view.ndim > WSYNC_MAX_NDIM) {
        return fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                           "has %d dimensions, at most %d are supported", (int)view.ndim,
                           (int)WSYNC_MAX_NDIM);
    }
    row->data = view.data != NULL ? (char *)view.data + view.byte_offset : NULL;
    row->ndim = (uint32_t)view.ndim;
    for (uint32_t i = 0; i < row->ndim; i++) {
        row->shape[i] = view.shape[i];
        row->stride[i] = view.strides[i];
    }
    if (finish_row(describer, tensor, row) < 0) {
        return -1;
    }
    return row->data != NULL && describer->owners != NULL ? hold_storage(describer, tensor)
                                                          : 0;
}

/* Copies tensor.shape or tensor.stride() into out; returns the length or -1. */
static Py_ssize_t read_integers(PyObject *sequence, int64_t out[WSYNC_MAX_NDIM])
{
    PyObject *tuple = sequence != NULL ? PySequence_Tuple(sequence) : NULL;
    const Py_ssize_t count = tuple != NULL ? PyTuple_Size(tuple) : -1;

    for (Py_ssize_t i = 0; i < count && i < WSYNC_MAX_NDIM; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    }
    Py_XDECREF(tuple);
    Py_XDECREF(sequence);
    return PyErr_Occurred() ? -1 : count;
}

/* --- one tensor ----------------------------------------------------------------------- */

/* A DTensor holds its elements in _local_tensor; where these are not all of them, the shape
 * is another.  Who knows where they belong describes the local tensor itself. */
static int read_local(describer_t *describer, PyObject *tensor, PyObject *local,
                      wsync_tensor_row_t *row)
{
    int64_t shape[WSYNC_MAX_NDIM];
    Py_ssize_t ndim;

    if (read_plain(describer, local, row) < 0) {
        return -1;
    }
    ndim = read_integers(PyObject_GetAttrString(tensor, "shape"), shape);
    if (ndim < 0) {
        return fail_with_cause(describer, tensor);
    }
    if (ndim != (Py_ssize_t)row->ndim ||
        memcmp(shape, row->shape, (size_t)ndim * sizeof(*shape)) != 0) {
        return fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                           "its _local_tensor has another shape, so its elements are on "
                           "several ranks");
    }
    return 0;
}

/* Reads the inner tensor of a wrapper, if it has one.  Torch gave no address for the
 * wrapper, or an exception that says why, which stays where there is no inner tensor. */
static int read_wrapper(describer_t *describer, PyObject *tensor, wsync_tensor_row_t *row)
{
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyObject *local = NULL;
    int result = 0;

    PyErr_Fetch(&type, &value, &traceback);
    local = PyObject_GetAttrString(tensor, "_local_tensor");
    if (local == NULL) {
        PyErr_Restore(type, value, traceback); /* drops the one that is set */
        return type != NULL ? -1 : 0;
    }
    result = read_local(describer, tensor, local, row);
    Py_DECREF(local);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return result;
}

static int read_tensor(describer_t *describer, PyObject *tensor, wsync_tensor_row_t *row)
{
    int result = read_plain(describer, tensor, row);

    if (result < 0 || (row->data == NULL && row->nbytes > 0)) {
        result = read_wrapper(describer, tensor, row);
    }
    if (result < 0) {
        return -1;
    }
    if (row->data == NULL && row->nbytes > 0) {
        return fail_tensor(describer, tensor, WSYNC_ERR_INVALID,
                           "its %llu bytes have no memory: torch gives a NULL pointer (a "
                           "wrapper subclass, as of a collective before its wait(), or "
                           "storage that was freed)",
                           (unsigned long long)row->nbytes);
    }
    return 0;
}

/* --- against a row -------------------------------------------------------------------- */

/* Whether what DLPack says is what a row says. */
static bool same_view(const DLTensor *view, const wsync_tensor_row_t *row, int gpu)
{
    const bool on_gpu = view->device.device_type == kDLCUDA;

    if (view->data == NULL || (char *)view->data + view->byte_offset != (char *)row->data ||
        view->ndim != (int32_t)row->ndim || !wsync_py_is_dtype(view->dtype, row->dtype) ||
        on_gpu != row->on_gpu || (on_gpu && view->device.device_id != gpu)) {
        return false;
    }
    for (uint32_t i = 0; i < row->ndim; i++) {
        if (view->shape[i] != row->shape[i] ||
            (view->strides[i] != row->stride[i] && row->shape[i] != 1)) {
            return false;
        }
    }
    return true;
}

/* Whether a tensor is where a row of a table says, and seen as it says, by one question;
 * false also where more has to be asked, as of wrappers and of tensors without elements. */
static bool is_there(describer_t *describer, PyObject *tensor,
                     const TensorTableObject *table)
{
    const DLPackExchangeAPI *api = find_api(describer, tensor);
    DLTensor view;

    if (api == NULL || api->dltensor_from_py_object_no_sync(tensor, &view) != 0) {
        PyErr_Clear();
        return false;
    }
    return same_view(&view, &table->rows[describer->index], table->gpu);
}

/* The index of the first tensor that is not where a row says, or not seen as it says; the
 * count if there is none, -1 with an exception. */
static Py_ssize_t find_moved(describer_t *describer, PyObject *tensors,
                             const TensorTableObject *table)
{
    for (Py_ssize_t i = 0; i < table->count; i++) {
        PyObject *tensor = PyTuple_GetItem(tensors, i);
        wsync_tensor_row_t row = {0};

        describer->index = i;
        if (is_there(describer, tensor, table)) {
            continue;
        }
        if (read_tensor(describer, tensor, &row) < 0) {
            if (!PyErr_ExceptionMatches(describer->state->base_error)) {
                return -1;
            }
            PyErr_Clear(); /* one that lies nowhere, or that cannot be described any more */
            return i;
        }
        if (row.data != table->rows[i].data || !wsync_py_same_form(&row, &table->rows[i])) {
            return i;
        }
    }
    return table->count;
}

PyObject *wsync_py_table_moved(PyObject *self, PyObject *sequence)
{
    const TensorTableObject *table = (TensorTableObject *)self;
    PyObject *tensors = PySequence_Tuple(sequence);
    describer_t describer = {
        .state = wsync_py_type_state(Py_TYPE(self)), .gpu = -1, .gpu_ok = 1};
    Py_ssize_t index = -1;

    if (tensors == NULL) {
        return NULL;
    }
    if (PyTuple_Size(tensors) != table->count) {
        (void)wsync_py_fail(describer.state, WSYNC_ERR_INVALID, "TensorTable",
                            "%zd tensors were given, but the table has %zd",
                            PyTuple_Size(tensors), table->count);
    } else {
        index = find_moved(&describer, tensors, table);
    }
    Py_DECREF(tensors);
    if (index < 0) {
        return NULL;
    }
    return index < table->count ? PyLong_FromSsize_t(index) : Py_NewRef(Py_None);
}

/* --- describe() ----------------------------------------------------------------------- */

/* Whether a table keeps these very tensors, each where it was. */
static bool is_table_of(describer_t *describer, PyObject *tensors,
                        const TensorTableObject *table)
{
    PyObject *own = table->owners != NULL ? PyList_GetItem(table->owners, 0) : NULL;
    bool same = own != NULL && PyTuple_Size(own) == table->count &&
                (table->gpu < 0 || describer->gpu_ok);

    for (Py_ssize_t i = 0; same && i < table->count; i++) {
        PyObject *tensor = PyTuple_GetItem(tensors, i);

        describer->index = i;
        same = tensor == PyTuple_GetItem(own, i) && is_there(describer, tensor, table);
    }
    return same;
}

/* former: a table of as many tensors, or NULL. */
static int describe_one(describer_t *describer, PyObject *tensor, TensorTableObject *table,
                        const TensorTableObject *former)
{
    wsync_tensor_row_t *row = &table->rows[describer->index];

    if (former != NULL && is_there(describer, tensor, former) &&
        (!former->rows[describer->index].on_gpu || take_gpu(describer, former->gpu))) {
        *row = former->rows[describer->index];
        return hold_storage(describer, tensor);
    }
    table->known = false;
    return read_tensor(describer, tensor, row);
}

static int describe_all(describer_t *describer, PyObject *tensors, TensorTableObject *table,
                        const TensorTableObject *former)
{
    describer->owners = table->owners;
    if (PyList_Append(table->owners, tensors) < 0) {
        return -1;
    }
    table->known = former != NULL;
    for (Py_ssize_t i = 0; i < table->count; i++) {
        describer->index = i;
        if (describe_one(describer, PyTuple_GetItem(tensors, i), table, former) < 0) {
            return -1;
        }
        if (__builtin_add_overflow(table->nbytes, table->rows[i].nbytes, &table->nbytes)) {
            PyErr_SetString(PyExc_OverflowError, "more than 2^64 bytes of tensors");
            return -1;
        }
    }
    table->gpu = (int)describer->gpu;
    return 0;
}

/* An object for each storage may be new, and many new objects have Python look for garbage,
 * at last among all objects of the process: that took longer than everything else here. */
static int describe_undisturbed(describer_t *describer, PyObject *tensors,
                                TensorTableObject *table, const TensorTableObject *former)
{
    const int collects = PyGC_Disable();
    const int result = describe_all(describer, tensors, table, former);

    if (collects) {
        (void)PyGC_Enable();
    }
    return result;
}

/* A tuple of names, or NULL: -1 with an exception. */
static int read_names(describer_t *describer, PyObject *names, Py_ssize_t count)
{
    if (names == NULL || names == Py_None) {
        return 0;
    }
    describer->names = PySequence_Tuple(names);
    if (describer->names == NULL) {
        return -1;
    }
    if (PyTuple_Size(describer->names) != count) {
        (void)wsync_py_fail(describer->state, WSYNC_ERR_INVALID, "describe",
                            "%zd tensors but %zd names", count,
                            PyTuple_Size(describer->names));
        return -1;
    }
    return 0;
}

static PyObject *describe(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"tensors", "names", "gpu", "former", NULL};
    describer_t describer = {.state = wsync_py_state(module), .gpu = -1};
    const TensorTableObject *former = NULL;
    TensorTableObject *table = NULL;
    PyObject *sequence = NULL;
    PyObject *names = NULL;
    PyObject *tensors = NULL;
    PyObject *given = Py_None;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OpO:describe", keywords, &sequence,
                                     &names, &describer.gpu_ok, &given)) {
        return NULL;
    }
    if (given != Py_None &&
        wsync_py_check_type(given, describer.state->type_TensorTable, "former") < 0) {
        return NULL;
    }
    tensors = PySequence_Tuple(sequence);
    if (tensors == NULL || read_names(&describer, names, PyTuple_Size(tensors)) < 0) {
        goto cleanup;
    }
    if (given != Py_None && ((TensorTableObject *)given)->count == PyTuple_Size(tensors)) {
        former = (const TensorTableObject *)given;
    }
    if (former != NULL && is_table_of(&describer, tensors, former)) {
        table = (TensorTableObject *)Py_NewRef(given);
        goto cleanup;
    }
    table = wsync_py_table_new(describer.state, PyTuple_Size(tensors));
    if (table != NULL) {
        table->owners = PyList_New(0);
        table->names = Py_XNewRef(describer.names);
        if (table->owners == NULL ||
            describe_undisturbed(&describer, tensors, table, former) < 0) {
            Py_CLEAR(table);
        }
    }

cleanup:
    Py_XDECREF(tensors);
    Py_XDECREF(describer.names);
    return (PyObject *)table;
}

PyMethodDef wsync_py_functions_describe[] = {
    {"describe", WSYNC_PY_KEYWORDS(describe),
     "describe(tensors, names=None, gpu=False, former=None)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
