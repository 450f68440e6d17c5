/* SPDX-License-Identifier: Apache-2.0
 * describe(): reads where torch tensors lie, without copying and without Python calls where
 * torch offers DLPack's C exchange API (2.10 and newer). */
#include "python/known_tensors.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "python/convert.h"

/* --- what one call of describe() carries along ---------------------------------------- */

enum { MAX_WRAPPERS = 4 };

typedef struct describer {
    ModuleState *state;
    PyObject *names;    /* borrowed tuple or NULL */
    PyObject *owners;   /* borrowed from the table: the tensors, and what they lie in; NULL:
                         * what is read is compared at once, and nothing has to be kept */
    PyTypeObject *type; /* borrowed: the type that `api` belongs to */
    const DLPackExchangeAPI *api;
    Py_ssize_t index;                /* of the tensor at hand */
    int depth;                       /* wrappers around the tensor at hand */
    int gpu_ok;                      /* whether tensors may lie on a GPU */
    int64_t gpu;                     /* that they lie on; -1: none has so far */
    const TensorTableObject *former; /* borrowed form of as many tensors, or NULL */
    Py_ssize_t unknown;              /* tensors that are not as it says */
    const PyObject *seen; /* borrowed from owners: what the last known one lies in */
    wsync_py_questions_t questions;
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
    if (describer->names != NULL) {
        PyObject *given = PyTuple_GetItem(describer->names, describer->index);

        name = PyObject_Str(given);
        if (name != NULL && PyUnicode_AsUTF8AndSize(name, NULL) == NULL) {
            PyErr_Clear();
            wsync_py_assign(&name, PyObject_ASCII(given));
        }
    }
    if (name == NULL) {
        PyErr_Clear();
        name = PyUnicode_FromFormat("tensor %zd", describer->index);
    }
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

/* Sparse and opaque tensors have no strided memory: torch's own message does not say so. */
static bool fail_layout(const describer_t *describer, PyObject *tensor)
{
    PyObject *text = attribute_text(tensor, "layout");
    const char *name = text != NULL ? PyUnicode_AsUTF8AndSize(text, NULL) : "torch.strided";
    const bool failed = strcmp(name, "torch.strided") != 0;

    if (failed) {
        (void)fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                          "layout %.64s is not supported, only torch.strided", name);
    }
    Py_XDECREF(text);
    return failed;
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
    if (fail_layout(describer, tensor)) {
        goto cleanup;
    }
    text = value != NULL ? PyObject_Str(value) : NULL;
    cause = text != NULL ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    if (cause == NULL) {
        cause = "no reason given";
    }
    length = (int)strcspn(cause, "\n"); /* torch appends pages of hints */
    (void)fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                      "torch does not tell where its elements lie: %.*s", length, cause);

cleanup:
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return -1;
}

/* --- dtype ---------------------------------------------------------------------------- */

static int read_dtype(const describer_t *describer, PyObject *tensor, wsync_dtype_t *dtype)
{
    PyObject *object = PyObject_GetAttr(tensor, describer->state->name_dtype);
    PyObject *known = NULL;
    PyObject *text = NULL;
    const char *name = NULL;
    int result = -1;

    if (object == NULL) {
        return fail_tensor(describer, tensor, WSYNC_ERR_INVALID,
                           "not a torch tensor: it has no dtype");
    }
    known = PyDict_GetItemWithError(describer->state->dtype_codes, object);
    if (known != NULL) {
        *dtype = (wsync_dtype_t)PyLong_AsLong(known);
        Py_DECREF(object);
        return 0;
    }
    if (PyErr_Occurred()) {
        goto cleanup;
    }
    text = PyObject_Str(object);
    name = text != NULL ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    if (name == NULL) {
        goto cleanup;
    }
    if (strncmp(name, "torch.", 6) != 0) {
        result = fail_tensor(describer, tensor, WSYNC_ERR_INVALID,
                             "not a torch tensor: its dtype is %.64s", name);
        goto cleanup;
    }
    if (wsync_dtype_from_name(name, dtype, NULL) != WSYNC_OK) {
        result = fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                             "dtype %.64s is not supported", name);
        goto cleanup;
    }
    known = PyLong_FromLong((long)*dtype);
    if (known != NULL) {
        result = PyDict_SetItem(describer->state->dtype_codes, object, known);
        Py_DECREF(known);
    }

cleanup:
    Py_XDECREF(text);
    Py_DECREF(object);
    return result;
}

/* Conjugation and negation are bits on the tensor, not in its bytes, and DLPack drops
 * them. */
static int refuse_lazy_bit(const describer_t *describer, PyObject *tensor,
                           wsync_py_question_t *method, const char *what)
{
    PyObject *answer = wsync_py_ask(method, tensor);
    const int set = answer != NULL ? PyObject_IsTrue(answer) : -1;

    Py_XDECREF(answer);
    if (set < 0) {
        return fail_with_cause(describer, tensor);
    }
    if (set != 0) {
        return fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                           "its %s bit is set: its bytes are not its values", what);
    }
    return 0;
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

        if (row->shape[i] < 0 || row->stride[i] < 0) {
            return fail_tensor(describer, tensor, WSYNC_ERR_INVALID,
                               "dim %u: extent %lld, stride %lld", (unsigned)i,
                               (long long)row->shape[i], (long long)row->stride[i]);
        }
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

/* Has the table own the storage that a finished row lies in: a tensor may get another one
 * (x.data = y) while the row is in use.  The storage was asked for after the row was read,
 * so it is checked to be the same, and that it was not made smaller than its tensor. */
static int hold_storage(describer_t *describer, PyObject *tensor, wsync_tensor_row_t *row)
{
    PyObject *storage = wsync_py_ask(&describer->questions.untyped_storage, tensor);
    uint64_t base = 0;
    uint64_t nbytes = 0;
    uint64_t offset = 0;
    int result = storage != NULL ? PyList_Append(describer->owners, storage) : -1;

    if (result == 0) {
        base = wsync_py_ask_number(&describer->questions.data_ptr, storage);
    }
    if (result == 0 && !PyErr_Occurred()) {
        nbytes = wsync_py_ask_number(&describer->questions.nbytes, storage);
    }
    Py_XDECREF(storage);
    if (PyErr_Occurred()) {
        return fail_with_cause(describer, tensor);
    }
    offset = (uint64_t)(uintptr_t)row->data - base;
    if (row->nbytes_spanned > 0 && ((uintptr_t)row->data < base || offset > nbytes ||
                                    row->nbytes_spanned > nbytes - offset)) {
        return fail_tensor(describer, tensor, WSYNC_ERR_INVALID,
                           "its elements span %llu bytes at 0x%llx, but its storage is "
                           "%llu bytes at 0x%llx: it was made smaller, freed or replaced",
                           (unsigned long long)row->nbytes_spanned,
                           (unsigned long long)(uintptr_t)row->data,
                           (unsigned long long)nbytes, (unsigned long long)base);
    }
    row->storage = base;
    row->storage_nbytes = nbytes;
    return 0;
}

static int fail_ndim(const describer_t *describer, PyObject *tensor, long long ndim)
{
    return fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                       "has %lld dimensions, at most %d are supported", ndim,
                       (int)WSYNC_MAX_NDIM);
}

static int fail_device(const describer_t *describer, PyObject *tensor)
{
    PyObject *text = attribute_text(tensor, "device");
    const char *name = text != NULL ? PyUnicode_AsUTF8AndSize(text, NULL) : "(unknown)";

    if (describer->gpu >= 0) {
        (void)fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                          "lies on device %.64s, others on cuda:%lld: one device serves "
                          "them all",
                          name, (long long)describer->gpu);
    } else {
        (void)fail_tensor(
            describer, tensor, WSYNC_ERR_UNSUPPORTED,
            "lies on device %.64s; %s is read here", name,
            describer->gpu_ok ? "memory of CPU and CUDA devices" : "CPU memory only");
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

/* Copies what DLPack says of a tensor whose dtype is known. */
static int read_view(const describer_t *describer, PyObject *tensor, const DLTensor *view,
                     wsync_tensor_row_t *row)
{
    const DLDataType dtype = wsync_py_dlpack_dtype(row->dtype);
    uintptr_t data = 0;

    if (view->ndim < 0 || view->ndim > WSYNC_MAX_NDIM) {
        return fail_ndim(describer, tensor, view->ndim);
    }
    if (view->dtype.code != dtype.code || view->dtype.bits != dtype.bits ||
        view->dtype.lanes != dtype.lanes) {
        return fail_tensor(describer, tensor, WSYNC_ERR_INVALID,
                           "its dtype is %s, but its elements are of DLPack's code %u with "
                           "%u bits and %u lanes",
                           wsync_dtype_name(row->dtype), view->dtype.code, view->dtype.bits,
                           view->dtype.lanes);
    }
    if ((view->ndim > 0 && (view->shape == NULL || view->strides == NULL)) ||
        __builtin_add_overflow((uintptr_t)view->data, view->byte_offset, &data)) {
        return fail_tensor(describer, tensor, WSYNC_ERR_INVALID,
                           "DLPack gives no shape, no strides or no address for it");
    }
    row->data = view->data != NULL ? (char *)view->data + view->byte_offset : NULL;
    row->ndim = (uint32_t)view->ndim;
    for (uint32_t i = 0; i < row->ndim; i++) {
        row->shape[i] = view->shape[i];
        row->stride[i] = view->strides[i];
    }
    return 0;
}

static int read_exchange(describer_t *describer, PyObject *tensor, wsync_tensor_row_t *row)
{
    DLTensor view; /* shape and strides are borrowed from the tensor: copy them at once */

    if (describer->api->dltensor_from_py_object_no_sync(tensor, &view) != 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_RuntimeError, "DLPack exchange failed");
        }
        return fail_with_cause(describer, tensor);
    }
    if (view.device.device_type != kDLCPU && view.device.device_type != kDLCUDAHost &&
        !(view.device.device_type == kDLCUDA &&
          take_gpu(describer, view.device.device_id))) {
        return fail_device(describer, tensor);
    }
    row->on_gpu = view.device.device_type == kDLCUDA;
    return read_view(describer, tensor, &view, row);
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

/* By the tensor's attributes; false also with an exception set. */
static bool on_readable_device(describer_t *describer, PyObject *tensor, bool *on_gpu)
{
    PyObject *device = PyObject_GetAttrString(tensor, "device");
    PyObject *kind = device != NULL ? PyObject_GetAttrString(device, "type") : NULL;
    PyObject *ordinal = NULL;
    bool readable = false;

    *on_gpu = false;
    if (kind != NULL && PyUnicode_Check(kind)) {
        if (PyUnicode_CompareWithASCIIString(kind, "cpu") == 0) {
            readable = true;
        } else if (PyUnicode_CompareWithASCIIString(kind, "cuda") == 0) {
            ordinal = PyObject_GetAttrString(device, "index");
            readable = ordinal != NULL && take_gpu(describer, PyLong_AsLongLong(ordinal));
            *on_gpu = true;
        }
    }
    Py_XDECREF(device);
    Py_XDECREF(kind);
    Py_XDECREF(ordinal);
    return readable && PyErr_Occurred() == NULL;
}

static int check_item(const describer_t *describer, PyObject *tensor, wsync_dtype_t dtype)
{
    PyObject *answer = PyObject_CallMethod(tensor, "element_size", NULL);
    const size_t nbytes = answer != NULL ? PyLong_AsSize_t(answer) : 0;

    Py_XDECREF(answer);
    if (PyErr_Occurred()) {
        return fail_with_cause(describer, tensor);
    }
    if (nbytes != wsync_dtype_nbytes(dtype)) {
        return fail_tensor(describer, tensor, WSYNC_ERR_INVALID,
                           "its dtype is %s, but its elements have %zu bytes",
                           wsync_dtype_name(dtype), nbytes);
    }
    return 0;
}

/* The way of torch before 2.10: five Python calls a tensor. */
static int read_attributes(describer_t *describer, PyObject *tensor,
                           wsync_tensor_row_t *row)
{
    const bool readable = on_readable_device(describer, tensor, &row->on_gpu);
    PyObject *address = NULL;
    Py_ssize_t ndim = -1;

    if (PyErr_Occurred()) {
        return fail_with_cause(describer, tensor);
    }
    if (!readable) {
        return fail_device(describer, tensor);
    }
    ndim = read_integers(PyObject_GetAttrString(tensor, "shape"), row->shape);
    if (ndim > WSYNC_MAX_NDIM) {
        return fail_ndim(describer, tensor, ndim);
    }
    if (ndim < 0 ||
        read_integers(PyObject_CallMethod(tensor, "stride", NULL), row->stride) != ndim) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "shape and stride() differ in length");
        }
        return fail_with_cause(describer, tensor);
    }
    address = PyObject_CallMethod(tensor, "data_ptr", NULL);
    row->data = address != NULL ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    if (PyErr_Occurred()) {
        return fail_with_cause(describer, tensor);
    }
    row->ndim = (uint32_t)ndim;
    return check_item(describer, tensor, row->dtype);
}

/* --- one tensor ----------------------------------------------------------------------- */

static int read_tensor(describer_t *describer, PyObject *tensor, wsync_tensor_row_t *row);

/* All elements of a wrapper are in its local tensor, or its shape would be another. */
static int check_same_shape(const describer_t *describer, PyObject *tensor,
                            const wsync_tensor_row_t *row, bool placed)
{
    int64_t shape[WSYNC_MAX_NDIM];
    const Py_ssize_t ndim = read_integers(PyObject_GetAttrString(tensor, "shape"), shape);

    if (ndim < 0) {
        return fail_with_cause(describer, tensor);
    }
    if (ndim != (Py_ssize_t)row->ndim ||
        memcmp(shape, row->shape, (size_t)ndim * sizeof(*shape)) != 0) {
        return fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                           placed ? "its _local_tensor has another shape: it holds its "
                                    "elements on several ranks"
                                  : "its _local_tensor has another shape, and it has no "
                                    "placements that would say why");
    }
    return 0;
}

/* A DTensor holds its elements in _local_tensor.  Partial sums are not a weight's bytes,
 * and those of one rank not a whole tensor's: who knows where they belong describes the
 * local tensor itself. */
static int read_local(describer_t *describer, PyObject *tensor, PyObject *local,
                      wsync_tensor_row_t *row)
{
    PyObject *placements = NULL;
    PyObject *tuple = NULL;
    Py_ssize_t count = 0;
    int result = 0;

    if (describer->depth == MAX_WRAPPERS) {
        return fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                           "its elements lie below more than %d wrappers", MAX_WRAPPERS);
    }
    placements = PyObject_GetAttrString(tensor, "placements");
    tuple = placements != NULL ? PySequence_Tuple(placements) : NULL;
    count = tuple != NULL ? PyTuple_Size(tuple) : 0;
    PyErr_Clear(); /* a wrapper of another kind: no placements to judge */
    for (Py_ssize_t i = 0; i < count && result == 0; i++) {
        PyObject *partial =
            PyObject_CallMethod(PyTuple_GetItem(tuple, i), "is_partial", NULL);
        const int is_partial = partial != NULL ? PyObject_IsTrue(partial) : -1;

        Py_XDECREF(partial);
        if (is_partial < 0) {
            result = fail_with_cause(describer, tensor);
        } else if (is_partial > 0) {
            result = fail_tensor(describer, tensor, WSYNC_ERR_UNSUPPORTED,
                                 "mesh dim %zd holds partial sums, not a weight", i);
        }
    }
    if (result == 0) {
        describer->depth++;
        result = read_tensor(describer, local, row);
        describer->depth--;
    }
    if (result == 0) {
        result = check_same_shape(describer, tensor, row, tuple != NULL);
    }
    Py_XDECREF(tuple);
    Py_XDECREF(placements);
    return result;
}

/* Torch gave no address: the elements are in an inner tensor, or nowhere. */
static int read_wrapper(describer_t *describer, PyObject *tensor, wsync_tensor_row_t *row)
{
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyObject *local = NULL;
    int result = -1;

    PyErr_Fetch(&type, &value, &traceback);
    local = PyObject_GetAttrString(tensor, "_local_tensor");
    if (local != NULL && local != tensor) {
        result = read_local(describer, tensor, local, row);
    } else if (type != NULL) {
        PyErr_Restore(type, value, traceback);
        type = value = traceback = NULL;
    } else {
        (void)fail_tensor(describer, tensor, WSYNC_ERR_INVALID,
                          "its %llu bytes lie nowhere: torch gives a NULL pointer (a "
                          "wrapper subclass, as of a collective before its wait(), or "
                          "storage that was freed)",
                          (unsigned long long)row->nbytes);
    }
    Py_XDECREF(local);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return result;
}

/* Finds the exchange API of a tensor's type, which may be that of the tensor before it. */
static int find_api(describer_t *describer, PyObject *tensor)
{
    if (Py_TYPE(tensor) != describer->type) {
        describer->api = wsync_py_exchange_api(describer->state, tensor);
        if (describer->api == NULL && PyErr_Occurred()) {
            return -1;
        }
        describer->type = Py_TYPE(tensor);
    }
    return 0;
}

static int read_tensor(describer_t *describer, PyObject *tensor, wsync_tensor_row_t *row)
{
    int result;

    if (find_api(describer, tensor) < 0 || read_dtype(describer, tensor, &row->dtype) < 0) {
        return -1;
    }
    if (describer->api != NULL && describer->api->dltensor_from_py_object_no_sync != NULL) {
        result = read_exchange(describer, tensor, row);
    } else {
        result = read_attributes(describer, tensor, row);
    }
    if (result < 0) {
        return read_wrapper(describer, tensor, row);
    }
    if (finish_row(describer, tensor, row) < 0) {
        return -1;
    }
    if (row->data == NULL && row->nbytes_spanned > 0) {
        return read_wrapper(describer, tensor, row);
    }
    row->type = describer->depth == 0 ? Py_TYPE(tensor) : NULL;
    if (describer->owners == NULL) {
        return 0;
    }
    if (hold_storage(describer, tensor, row) < 0) {
        return -1;
    }
    if ((row->dtype == WSYNC_DTYPE_COMPLEX64 || row->dtype == WSYNC_DTYPE_COMPLEX128) &&
        refuse_lazy_bit(describer, tensor, &describer->questions.is_conj, "conj") < 0) {
        return -1;
    }
    return refuse_lazy_bit(describer, tensor, &describer->questions.is_neg, "neg");
}

/* --- the functions ------------------------------------------------------------------- */

/* Whether two rows are of the same memory, seen in the same way.  Storages are compared if
 * both rows know theirs. */
static bool same_place(const wsync_tensor_row_t *one, const wsync_tensor_row_t *other,
                       bool storages)
{
    return one->data == other->data && wsync_py_same_form(one, other) &&
           (!storages || (one->storage == other->storage &&
                          one->storage_nbytes == other->storage_nbytes));
}

/* Whether the tensor at hand is where a row says, and in the same storage, which it keeps
 * then.  Asked in few calls; false also where more has to be asked. */
static bool is_known(describer_t *describer, PyObject *tensor,
                     const TensorTableObject *table)
{
    wsync_py_questions_t *questions = &describer->questions;
    PyObject *known = wsync_py_known_storage(questions, describer->api, table,
                                             describer->index, tensor, NULL);
    PyObject *storage =
        known != NULL ? wsync_py_ask(&questions->untyped_storage, tensor) : NULL;
    const bool same = storage != NULL && storage == known &&
                      PyList_Append(describer->owners, storage) == 0;

    Py_XDECREF(known);
    Py_XDECREF(storage);
    return same;
}

/* The same without a storage. */
static bool is_there(describer_t *describer, PyObject *tensor,
                     const TensorTableObject *table)
{
    return wsync_py_same_place(describer->api, tensor, &table->rows[describer->index],
                               table->gpu);
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
        if (find_api(describer, tensor) == 0 &&
            (describer->owners == NULL
                 ? is_there(describer, tensor, table)
                 : table->storages != NULL && is_known(describer, tensor, table))) {
            continue;
        }
        if (wsync_py_refused() < 0) {
            return -1;
        }
        if (read_tensor(describer, tensor, &row) < 0) {
            /* one that lies nowhere, or that cannot be described any more */
            return wsync_py_refused() < 0 ? -1 : i;
        }
        if (!same_place(&row, &table->rows[i], describer->owners != NULL)) {
            return i;
        }
    }
    return table->count;
}

/* The same of any sequence; owners: NULL, or a list that gets the storages. */
static Py_ssize_t compare(const TensorTableObject *table, PyObject *sequence,
                          PyObject *owners)
{
    PyObject *tensors = PySequence_Tuple(sequence);
    describer_t describer = {.state = wsync_py_type_state(Py_TYPE((PyObject *)table)),
                             .owners = owners,
                             .gpu = -1,
                             .gpu_ok = 1};
    Py_ssize_t index = -1;

    if (tensors == NULL) {
        return -1;
    }
    describer.questions = wsync_py_questions(describer.state);
    if (PyTuple_Size(tensors) != table->count) {
        (void)wsync_py_fail(describer.state, WSYNC_ERR_INVALID, "TensorTable",
                            "%zd tensors for a table of %zd", PyTuple_Size(tensors),
                            table->count);
    } else {
        index = find_moved(&describer, tensors, table);
    }
    Py_DECREF(tensors);
    return index;
}

PyObject *wsync_py_table_moved(PyObject *self, PyObject *sequence)
{
    const TensorTableObject *table = (TensorTableObject *)self;
    const Py_ssize_t index = compare(table, sequence, NULL);

    if (index < 0) {
        return NULL;
    }
    return index < table->count ? PyLong_FromSsize_t(index) : Py_NewRef(Py_None);
}

PyObject *wsync_py_table_storages(PyObject *self, PyObject *sequence)
{
    const TensorTableObject *table = (TensorTableObject *)self;
    PyObject *storages = PyList_New(0);
    const int collects = PyGC_Disable(); /* see describe_undisturbed() */
    const Py_ssize_t index = storages != NULL ? compare(table, sequence, storages) : -1;

    if (collects) {
        (void)PyGC_Enable();
    }
    if (index == table->count) {
        return storages;
    }
    Py_XDECREF(storages);
    return index >= 0 ? Py_NewRef(Py_None) : NULL;
}

/* Whether all that a row of the former table says still holds; -1 with an exception. */
static int take_known(describer_t *describer, PyObject *tensor)
{
    const TensorTableObject *former = describer->former;
    const wsync_tensor_row_t *known = &former->rows[describer->index];
    PyObject *storage;
    int result;

    if (find_api(describer, tensor) < 0) {
        return -1;
    }
    if (known->on_gpu && !take_gpu(describer, former->gpu)) {
        return 0;
    }
    storage = wsync_py_known_storage(&describer->questions, describer->api, former,
                                     describer->index, tensor, describer->seen);
    if (storage == NULL) {
        return PyErr_Occurred() != NULL ? -1 : 0;
    }
    describer->seen = storage;
    result = PyList_Append(describer->owners, storage) < 0 ? -1 : 1;
    Py_DECREF(storage);
    return result;
}

static int describe_one(describer_t *describer, PyObject *tensor, TensorTableObject *table)
{
    /* where hardly any is known, as of weights that have all moved, none is asked for */
    const bool asked =
        describer->former != NULL && describer->unknown <= describer->index / 2 + 16;
    const int known = asked ? take_known(describer, tensor) : 0;
    wsync_tensor_row_t *row;

    if (known != 0) {
        return known < 0 ? -1 : 0;
    }
    describer->unknown++;
    if (wsync_py_table_part(table) < 0) {
        return -1;
    }
    row = &table->rows[describer->index];
    *row = (wsync_tensor_row_t){0};
    return read_tensor(describer, tensor, row);
}

static int describe_all(describer_t *describer, PyObject *tensors, TensorTableObject *table)
{
    table->owners = PyList_New(0);
    if (table->owners == NULL || PyList_Append(table->owners, tensors) < 0) {
        return -1;
    }
    describer->owners = table->owners;
    table->nbytes = 0;
    for (Py_ssize_t i = 0; i < table->count; i++) {
        describer->index = i;
        if (describe_one(describer, PyTuple_GetItem(tensors, i), table) < 0) {
            return -1;
        }
        if (__builtin_add_overflow(table->nbytes, table->rows[i].nbytes, &table->nbytes)) {
            PyErr_SetString(PyExc_OverflowError, "more than 2^64 bytes of tensors");
            return -1;
        }
    }
    return 0;
}

/* An object for each storage is new, and many new objects have Python look for garbage, at
 * last among all objects of the process: that took longer than everything else here. */
static int describe_undisturbed(describer_t *describer, PyObject *tensors,
                                TensorTableObject *table)
{
    const int collects = PyGC_Disable();
    const int result = describe_all(describer, tensors, table);

    if (collects) {
        (void)PyGC_Enable();
    }
    return result;
}

static int describer_init(describer_t *describer, PyObject *names, Py_ssize_t count)
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
    TensorTableObject *table = NULL;
    PyObject *sequence = NULL;
    PyObject *names = NULL;
    PyObject *tensors = NULL;
    PyObject *former = Py_None;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OpO:describe", keywords, &sequence,
                                     &names, &describer.gpu_ok, &former)) {
        return NULL;
    }
    if (former != Py_None && !Py_IS_TYPE(former, describer.state->type_TensorTable)) {
        return PyErr_Format(PyExc_TypeError, "former must be a TensorTable or None, not %R",
                            (PyObject *)Py_TYPE(former));
    }
    describer.questions = wsync_py_questions(describer.state);
    tensors = PySequence_Tuple(sequence);
    if (tensors == NULL || describer_init(&describer, names, PyTuple_Size(tensors)) < 0) {
        goto cleanup;
    }
    if (former != Py_None && ((TensorTableObject *)former)->storages != NULL &&
        ((TensorTableObject *)former)->count == PyTuple_Size(tensors)) {
        describer.former = (const TensorTableObject *)former;
    }
    table = describer.former != NULL
                ? wsync_py_table_like(describer.state, describer.former)
                : wsync_py_table_new(describer.state, PyTuple_Size(tensors));
    if (table != NULL && describe_undisturbed(&describer, tensors, table) < 0) {
        Py_CLEAR(table);
    }
    if (table != NULL) {
        table->gpu = (int)describer.gpu;
        table->names = Py_XNewRef(describer.names);
        table->known = describer.former != NULL && describer.unknown == 0;
    }

cleanup:
    Py_XDECREF(tensors);
    Py_XDECREF(describer.names);
    return (PyObject *)table;
}

PyMethodDef wsync_py_functions_describe[] = {
    {"describe", WSYNC_PY_KEYWORDS(describe),
     "describe(tensors, names=None, gpu=False, former=None)\n--\n\n"
     "Describes torch tensors without copying; names are for error messages.  With gpu\n"
     "they may lie on a GPU, all of those on the same one.  former: form() of a table of\n"
     "them, which says the same in less time where it still holds."},
    {NULL, NULL, 0, NULL},
};
