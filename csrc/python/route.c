/* SPDX-License-Identifier: Apache-2.0
 * Route: the copies that fill one layout from another. */
#include "python/route.h"

#include <stdbool.h>

#include "python/convert.h"
#include "python/layout.h"

static PyObject *route_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"source", "destination", NULL};
    ModuleState *state = wsync_py_type_state(type);
    PyObject *source;
    PyObject *destination;
    RouteObject *self;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!:Route", keywords,
                                     state->type_Layout, &source, state->type_Layout,
                                     &destination)) {
        return NULL;
    }
    self = (RouteObject *)wsync_py_alloc(type);
    if (self == NULL) {
        return NULL;
    }
    self->id = wsync_py_new_id();
    Py_BEGIN_ALLOW_THREADS
        status =
            wsync_route_create(((LayoutObject *)source)->layout,
                               ((LayoutObject *)destination)->layout, &self->route, &err);
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        Py_DECREF(self);
        return wsync_py_raise(state, &err);
    }
    return (PyObject *)self;
}

static void route_dealloc(PyObject *self)
{
    wsync_route_destroy(((RouteObject *)self)->route);
    wsync_py_free(self);
}

WSYNC_PY_NUMBER_GETTER(route_buffer_count,
                       wsync_route_buffer_count(((RouteObject *)self)->route))

/* The copies of a buffer; -1 with IndexError. */
static int find_copies(PyObject *self, PyObject *object, const wsync_copy_t **copies,
                       size_t *count)
{
    const wsync_route_t *route = ((RouteObject *)self)->route;
    size_t buffer;

    if (wsync_py_read_index(object, wsync_route_buffer_count(route), "buffer", &buffer) <
        0) {
        return -1;
    }
    *copies = wsync_route_copies(route, (uint32_t)buffer, count);
    return 0;
}

static PyObject *route_copies(PyObject *self, PyObject *object)
{
    const wsync_copy_t *copies;
    size_t count;

    return find_copies(self, object, &copies, &count) == 0
               ? wsync_py_copy_list(copies, count)
               : NULL;
}

static PyObject *route_nbytes(PyObject *self, PyObject *object)
{
    const wsync_copy_t *copies;
    size_t count;

    return find_copies(self, object, &copies, &count) == 0
               ? PyLong_FromUnsignedLongLong(wsync_copies_nbytes(copies, count))
               : NULL;
}

static PyMethodDef route_methods[] = {
    {"copies", route_copies, METH_O, "copies($self, buffer, /)\n--\n\n"},
    {"nbytes", route_nbytes, METH_O, "nbytes($self, buffer, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef route_getset[] = {
    {"buffer_count", route_buffer_count, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot route_slots[] = {
    {Py_tp_doc, "Route(source, destination)\n--\n\n"},
    {Py_tp_new, route_new},
    {Py_tp_dealloc, route_dealloc},
    {Py_tp_methods, route_methods},
    {Py_tp_getset, route_getset},
    {0, NULL},
};

static int add_all_buffers(PyObject *module, PyTypeObject *Py_UNUSED(type))
{
    return PyModule_AddIntConstant(module, "ALL_BUFFERS", WSYNC_PY_ALL_BUFFERS);
}

const wsync_py_type_t wsync_py_type_Route = {
    "wsync._core.Route", sizeof(RouteObject), 0, route_slots, NULL, add_all_buffers};
