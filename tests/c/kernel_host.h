/* SPDX-License-Identifier: Apache-2.0
 * The kernels of csrc/device/kernels.cu, run by the calling thread: for unit tests and for
 * the stand-in of the CUDA driver. */
#ifndef WSYNC_TESTS_KERNEL_HOST_H
#define WSYNC_TESTS_KERNEL_HOST_H

/* As cuLaunchKernel with one-dimensional sizes; returns when the kernel has run.  Device
 * addresses are addresses of this process.  Returns a CUresult: 0; 1 for sizes that the
 * kernel is not made for; 500 for a name that is no kernel.  May be called by several
 * threads at once. */
int wsync_host_kernel_launch(const char *name, unsigned grid, unsigned block,
                             void **params);

#endif
