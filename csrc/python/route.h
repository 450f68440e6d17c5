/* SPDX-License-Identifier: Apache-2.0
 * Route, as other files of csrc/python use it.  Its type is ModuleState.type_Route. */
#ifndef WSYNC_PYTHON_ROUTE_H
#define WSYNC_PYTHON_ROUTE_H

#include "python/module.h"

#include "core/route.h"

/* Immutable. */
typedef struct RouteObject {
    PyObject_HEAD
    wsync_route_t *route; /* owned */
} RouteObject;

#endif
