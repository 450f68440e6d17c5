/* SPDX-License-Identifier: Apache-2.0
 * dict_values(): the values of a dict whose keys are known, at one moment. */
#include "python/module.h"

static PyObject *dict_values(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *dict;
    PyObject *keys;
    PyObject *key = NULL;
    PyObject *value = NULL;
    PyObject *values;
    Py_ssize_t place = 0;
    Py_ssize_t count;
    Py_ssize_t i = 0;

    if (!PyArg_ParseTuple(args, "O!O!:dict_values", &PyDict_Type, &dict, &PyTuple_Type,
                          &keys)) {
        return NULL;
    }
    count = PyTuple_Size(keys);
    if (PyDict_Size(dict) != count) {
        Py_RETURN_NONE;
    }
    values = PyTuple_New(count); /* may collect garbage, whose end may change the dict */
    while (values != NULL && i < count && PyDict_Next(dict, &place, &key, &value) &&
           key == PyTuple_GetItem(keys, i)) {
        (void)PyTuple_SetItem(values, i, Py_NewRef(value));
        i++;
    }
    if (values != NULL && (i < count || PyDict_Size(dict) != count)) {
        Py_DECREF(values);
        Py_RETURN_NONE;
    }
    return values;
}

PyMethodDef wsync_py_functions_dict_values[] = {
    {"dict_values", dict_values, METH_VARARGS,
     "dict_values(held, keys, /)\n--\n\n"
     "The values of a dict as they are at one moment, if its keys are these very objects\n"
     "in this order; else None, as for keys that are only equal."},
    {NULL, NULL, 0, NULL},
};
