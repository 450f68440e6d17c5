/* SPDX-License-Identifier: Apache-2.0
 * dict_values(): the values of dicts whose keys are known, at one moment. */
#include "python/module.h"

#include <stdbool.h>

static bool same_key(PyObject *key, PyObject *known)
{
    return key == known || (PyUnicode_CheckExact(key) && PyUnicode_CheckExact(known) &&
                            PyUnicode_Compare(key, known) == 0);
}

/* Appends the values of a dict; 0 where its keys are others, -1 with an exception.  Nothing
 * here runs code of Python, which might change the dict. */
static int append_values(PyObject *values, PyObject *dict, PyObject *keys)
{
    PyObject *key = NULL;
    PyObject *value = NULL;
    Py_ssize_t place = 0;
    Py_ssize_t i;

    if (!PyDict_Check(dict) || !PyTuple_Check(keys)) {
        PyErr_SetString(PyExc_TypeError,
                        "dict_values: a list of dicts and a list of tuples");
        return -1;
    }
    if (PyDict_Size(dict) != PyTuple_Size(keys)) {
        return 0;
    }
    for (i = 0; PyDict_Next(dict, &place, &key, &value); i++) {
        if (!same_key(key, PyTuple_GetItem(keys, i))) {
            return 0;
        }
        if (PyList_Append(values, value) < 0) {
            return -1;
        }
    }
    return 1;
}

static PyObject *dict_values(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *dicts;
    PyObject *keys;
    PyObject *values;
    Py_ssize_t count;
    Py_ssize_t i;
    int found = 1;

    if (!PyArg_ParseTuple(args, "O!O!:dict_values", &PyList_Type, &dicts, &PyList_Type,
                          &keys)) {
        return NULL;
    }
    count = PyList_Size(dicts);
    if (PyList_Size(keys) != count) {
        PyErr_SetString(PyExc_ValueError, "dict_values: as many dicts as tuples of keys");
        return NULL;
    }
    values = PyList_New(0);
    for (i = 0; values != NULL && found > 0 && i < count; i++) {
        found = append_values(values, PyList_GetItem(dicts, i), PyList_GetItem(keys, i));
    }
    if (values != NULL && found <= 0) {
        Py_DECREF(values);
        return found < 0 ? NULL : Py_NewRef(Py_None);
    }
    return values;
}

PyMethodDef wsync_py_functions_dict_values[] = {
    {"dict_values", dict_values, METH_VARARGS, "dict_values(dicts, keys, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
