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

/* The copies of the buffer that the arguments name; false with an exception set. */
static bool parse_buffer(PyObject *self, PyObject *args, PyObject *kwargs,
                         const char *format, const wsync_copy_t **copies, size_t *count)
{
    static char *keywords[] = {"buffer", NULL};
    const wsync_route_t *route = ((RouteObject *)self)->route;
    const uint32_t buffer_count = wsync_route_buffer_count(route);
    long long buffer;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, keywords, &buffer)) {
        return false;
    }
    if (buffer < 0 || buffer >= (long long)buffer_count) {
        PyErr_Format(PyExc_IndexError, "buffer %lld of a route with %u", buffer,
                     buffer_count);
        return false;
    }
    *copies = wsync_route_copies(route, (uint32_t)buffer, count);
    return true;
}

static PyObject *route_copies(PyObject *self, PyObject *args, PyObject *kwargs)
{
    const wsync_copy_t *copies;
    size_t count;

    if (!parse_buffer(self, args, kwargs, "L:copies", &copies, &count)) {
        return NULL;
    }
    return wsync_py_copy_list(copies, count);
}

static PyObject *route_nbytes(PyObject *self, PyObject *args, PyObject *kwargs)
{
    const wsync_copy_t *copies;
    size_t count;

    if (!parse_buffer(self, args, kwargs, "L:nbytes", &copies, &count)) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(wsync_copies_nbytes(copies, count));
}

static PyMethodDef route_methods[] = {
    {"copies", WSYNC_PY_KEYWORDS(route_copies), "copies($self, buffer)\n--\n\n"},
    {"nbytes", WSYNC_PY_KEYWORDS(route_nbytes), "nbytes($self, buffer)\n--\n\n"},
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
