/* SPDX-License-Identifier: Apache-2.0 */
#include "python/convert.h"

#include <string.h>

const char *wsync_py_read_text(ModuleState *state, PyObject *object, const char *what)
{
    Py_ssize_t length = 0;
    const char *text = NULL;
    const char *odd = NULL;
    PyObject *shown = NULL;

    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: not a string: %R", what, object);
        return NULL;
    }
    text = PyUnicode_AsUTF8AndSize(object, &length);
    if (text != NULL && strlen(text) == (size_t)length) {
        return text;
    }
    if (text == NULL && !PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        return NULL;
    }
    odd = text != NULL ? "null character" : "character that UTF-8 does not have";
    PyErr_Clear();
    shown = PyObject_ASCII(object);
    text = shown != NULL ? PyUnicode_AsUTF8AndSize(shown, NULL) : NULL;
    if (text != NULL) {
        (void)wsync_py_fail(state, WSYNC_ERR_INVALID, "text", "%s: %.256s has a %s", what,
                            text, odd);
    }
    Py_XDECREF(shown);
    return NULL;
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
        PyErr_Format(PyExc_ValueError, "%s: %u numbers where there are %u dimensions", what,
                     found, count);
        return -1;
    }
    return 0;
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
        PyObject *item = copy_tuple(&copies[i]);

        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}
