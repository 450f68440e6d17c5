/* SPDX-License-Identifier: Apache-2.0
 * Route, as other files of csrc/python use it.  Its type is ModuleState.type_Route. */
#ifndef WSYNC_PYTHON_ROUTE_H
#define WSYNC_PYTHON_ROUTE_H

#include "python/module.h"

#include "core/route.h"

/* In place of a buffer of a route; no number that a mistake would make. */
enum { WSYNC_PY_ALL_BUFFERS = INT32_MIN };

/* Immutable. */
typedef struct RouteObject {
    PyObject_HEAD
    wsync_route_t *route; /* owned */
    uint64_t id;          /* of its lists of copies */
} RouteObject;

#endif
