/* SPDX-License-Identifier: Apache-2.0 */
#include "python/convert.h"

#include <stdlib.h>
#include <string.h>

const char *wsync_py_read_text(ModuleState *state, PyObject *object, const char *what)
{
    Py_ssize_t length = 0;
    const char *text = NULL;

    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: not a string: %R", what, object);
        return NULL;
    }
    text = PyUnicode_AsUTF8AndSize(object, &length);
    if (text != NULL && strlen(text) != (size_t)length) {
        return wsync_py_fail(state, WSYNC_ERR_INVALID, "text",
                             "%s: '%.256s' has a null character", what, text);
    }
    return text;
}

int wsync_py_read_int64s(PyObject *sequence, const char *what,
                         int64_t values[WSYNC_MAX_NDIM], uint32_t *count)
{
    /* A tuple is its own tuple: no copy in the usual case. */
    PyObject *tuple = PySequence_Tuple(sequence);
    const Py_ssize_t length = tuple != NULL ? PyTuple_Size(tuple) : -1;
    int result = -1;

    if (tuple == NULL) {
        PyErr_Format(PyExc_TypeError, "%s: not a sequence of integers: %R", what, sequence);
        return -1;
    }
    if (length > WSYNC_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "%s: %zd numbers, at most %d are supported", what,
                     length, (int)WSYNC_MAX_NDIM);
        goto cleanup;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        values[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (values[i] == -1 && PyErr_Occurred()) {
            goto cleanup;
        }
    }
    *count = (uint32_t)length;
    result = 0;

cleanup:
    Py_DECREF(tuple);
    return result;
}

int wsync_py_read_exactly(PyObject *sequence, const char *what,
                          int64_t values[WSYNC_MAX_NDIM], uint32_t count)
{
    uint32_t found = 0;

    if (wsync_py_read_int64s(sequence, what, values, &found) < 0) {
        return -1;
    }
    if (found != count) {
        PyErr_Format(PyExc_ValueError, "%s: %u numbers for %u dimensions", what, found,
                     count);
        return -1;
    }
    return 0;
}

int wsync_py_read_index(PyObject *object, size_t count, const char *what, size_t *index)
{
    const Py_ssize_t value = PyLong_AsSsize_t(object);

    if (value == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (value < 0 || (size_t)value >= count) {
        PyErr_Format(PyExc_IndexError, "%s %zd is out of range (%zu in all)", what, value,
                     count);
        return -1;
    }
    *index = (size_t)value;
    return 0;
}

int wsync_py_check_type(PyObject *object, PyTypeObject *type, const char *what)
{
    if (Py_IS_TYPE(object, type)) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s must be %R, not %R", what, (PyObject *)type,
                 (PyObject *)Py_TYPE(object));
    return -1;
}

int wsync_py_read_u32(long long value, const char *what, uint32_t *result)
{
    if (value < 0 || value > (long long)UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s %lld is not between 0 and %u", what, value,
                     UINT32_MAX);
        return -1;
    }
    *result = (uint32_t)value;
    return 0;
}

int wsync_py_convert_u64(PyObject *object, void *value)
{
    const unsigned long long converted = PyLong_AsUnsignedLongLong(object);

    if (converted == (unsigned long long)-1 && PyErr_Occurred()) {
        return 0;
    }
    *(uint64_t *)value = converted;
    return 1;
}

int wsync_py_convert_u32(PyObject *object, void *value)
{
    uint64_t converted = 0;

    if (!wsync_py_convert_u64(object, &converted)) {
        return 0;
    }
    if (converted > UINT32_MAX) {
        (void)PyErr_Format(PyExc_OverflowError, "%llu does not fit 32 bits",
                           (unsigned long long)converted);
        return 0;
    }
    *(uint32_t *)value = (uint32_t)converted;
    return 1;
}

int wsync_py_convert_address(PyObject *object, void *value)
{
    *(void **)value = PyLong_AsVoidPtr(object);
    return PyErr_Occurred() == NULL;
}

PyObject *wsync_py_capsule_new(size_t nbytes, const char *name,
                               PyCapsule_Destructor destroy, void **record)
{
    PyObject *capsule;

    *record = calloc(1, nbytes);
    if (*record == NULL) {
        return PyErr_NoMemory();
    }
    capsule = PyCapsule_New(*record, name, destroy);
    if (capsule == NULL) {
        free(*record);
    }
    return capsule;
}

void wsync_py_assign(PyObject **slot, PyObject *value)
{
    PyObject *old = *slot;

    *slot = value;
    Py_XDECREF(old);
}

PyObject *wsync_py_int64_tuple(const int64_t *values, uint32_t count)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);

    for (uint32_t i = 0; tuple != NULL && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);

        if (value == NULL || PyTuple_SetItem(tuple, (Py_ssize_t)i, value) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

void wsync_py_list_put(PyObject **list, size_t index, PyObject *value)
{
    if (value == NULL || PyList_SetItem(*list, (Py_ssize_t)index, value) < 0) {
        Py_CLEAR(*list);
    }
}

int wsync_py_items_init(wsync_py_items_t *items, PyObject *sequence, size_t item_nbytes,
                        wsync_py_read_func_t read, const void *context)
{
    *items = (wsync_py_items_t){.tuple = sequence != NULL ? PySequence_Tuple(sequence)
                                                          : PyTuple_New(0)};
    if (items->tuple == NULL) {
        return -1;
    }
    items->count = (size_t)PyTuple_Size(items->tuple);
    items->items = calloc(items->count + 1, item_nbytes);
    if (items->items == NULL) {
        (void)PyErr_NoMemory();
    }
    for (size_t i = 0; items->items != NULL && i < items->count && PyErr_Occurred() == NULL;
         i++) {
        (void)read(context, PyTuple_GetItem(items->tuple, (Py_ssize_t)i), i,
                   (char *)items->items + i * item_nbytes);
    }
    if (PyErr_Occurred() != NULL) {
        wsync_py_items_fini(items);
        return -1;
    }
    return 0;
}

typedef struct text_context {
    ModuleState *state;
    const char *what;
} text_context_t;

static int read_text(const void *context, PyObject *object, size_t index, void *item)
{
    const text_context_t *about = context;
    char what[32];
    const char *text;

    (void)PyOS_snprintf(what, sizeof(what), "%s[%zu]", about->what, index);
    text = wsync_py_read_text(about->state, object, what);
    *(const char **)item = text;
    return text != NULL ? 0 : -1;
}

int wsync_py_items_init_texts(wsync_py_items_t *items, ModuleState *state,
                              PyObject *sequence, const char *what)
{
    const text_context_t about = {state, what};

    return wsync_py_items_init(items, sequence, sizeof(const char *), read_text, &about);
}

void wsync_py_items_fini(wsync_py_items_t *items)
{
    free(items->items);
    Py_XDECREF(items->tuple);
    *items = (wsync_py_items_t){0};
}

static PyObject *copy_tuple(const wsync_copy_t *copy)
{
    return Py_BuildValue("IIKKKBNNN", copy->source_buffer, copy->destination_buffer,
                         (unsigned long long)copy->source_offset,
                         (unsigned long long)copy->destination_offset,
                         (unsigned long long)copy->row_count, copy->transform,
                         wsync_py_int64_tuple(copy->extent, copy->ndim),
                         wsync_py_int64_tuple(copy->source_stride, copy->ndim),
                         wsync_py_int64_tuple(copy->destination_stride, copy->ndim));
}

PyObject *wsync_py_copy_list(const wsync_copy_t *copies, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);

    for (size_t i = 0; list != NULL && i < count; i++) {
        wsync_py_list_put(&list, i, copy_tuple(&copies[i]));
    }
    return list;
}
