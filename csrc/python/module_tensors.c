/* SPDX-License-Identifier: Apache-2.0
 * held_tensors(): walks a torch module.  An engine asks at every update what its module
 * holds, and torch's own iterators cost more than the update of a small tensor. */
#include "python/module.h"

/* Puts the values of a dict attribute that are not None at the end of a list, and their
 * keys at the end of `keys`, with a None after them: where one dict ends is a part of what
 * a module is. */
static int append_items(PyObject *part, PyObject *name, PyObject *keys, PyObject *list)
{
    PyObject *values = PyObject_GetAttr(part, name);
    PyObject *key = NULL;
    PyObject *value = NULL;
    Py_ssize_t place = 0;
    int result = 0;

    if (values == NULL) {
        return -1;
    }
    if (!PyDict_Check(values)) {
        PyErr_Format(PyExc_TypeError, "%U of %R is no dict", name, Py_TYPE(part));
        result = -1;
    }
    while (result == 0 && PyDict_Next(values, &place, &key, &value)) {
        if (value != Py_None &&
            (PyList_Append(keys, key) < 0 || PyList_Append(list, value) < 0)) {
            result = -1;
        }
    }
    Py_DECREF(values);
    return result < 0 ? -1 : PyList_Append(keys, Py_None);
}

/* The last element of a list, taken out of it. */
static PyObject *pop(PyObject *list)
{
    const Py_ssize_t last = PyList_Size(list) - 1;
    PyObject *item = PyList_GetItem(list, last);

    Py_XINCREF(item);
    if (item == NULL || PyList_SetSlice(list, last, last + 1, NULL) < 0) {
        Py_XDECREF(item);
        return NULL;
    }
    return item;
}

static int visit(PyObject *part, const ModuleState *state, PyObject *seen, PyObject *stack,
                 PyObject *keys, PyObject *tensors)
{
    const int known = PySet_Contains(seen, part);

    if (known != 0) {
        return known < 0 ? -1 : 0;
    }
    return PySet_Add(seen, part) < 0 ||
                   append_items(part, state->name__modules, keys, stack) < 0 ||
                   append_items(part, state->name__parameters, keys, tensors) < 0 ||
                   append_items(part, state->name__buffers, keys, tensors) < 0
               ? -1
               : 0;
}

static PyObject *held_tensors(PyObject *self, PyObject *module)
{
    const ModuleState *state = wsync_py_state(self);
    PyObject *seen = PySet_New(NULL);
    PyObject *stack = PyList_New(0);
    PyObject *keys = PyList_New(0);
    PyObject *tensors = PyList_New(0);
    PyObject *found = NULL;
    int result = -1;

    if (seen != NULL && stack != NULL && keys != NULL && tensors != NULL) {
        result = PyList_Append(stack, module);
    }
    while (result == 0 && PyList_Size(stack) > 0) {
        PyObject *part = pop(stack);

        result = part != NULL ? visit(part, state, seen, stack, keys, tensors) : -1;
        Py_XDECREF(part);
    }
    if (result == 0) {
        found = PyTuple_Pack(2, keys, tensors);
    }
    Py_XDECREF(tensors);
    Py_XDECREF(keys);
    Py_XDECREF(stack);
    Py_XDECREF(seen);
    return found;
}

PyMethodDef wsync_py_functions_held_tensors[] = {
    {"held_tensors", held_tensors, METH_O,
     "held_tensors(module, /)\n--\n\n"
     "(names, tensors): every parameter and buffer of a torch module and of the modules in "
     "it,\n"
     "each module once, in an order that is the same while they are.  As long as names are "
     "equal\n"
     "and tensors are the same objects, every tensor has the path that it had."},
    {NULL, NULL, 0, NULL},
};
