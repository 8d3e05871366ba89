// Unit tests of the C++ kernels by themselves: functions of the library against obvious loops in double, and the law
// that a row's result depends on no other row and on no number of threads. Needs nothing of Python or torch, so it also
// runs where neither does: other compilers, other instruction sets, an emulator. tests/e2e/test_kernel_builds.py builds it.

#include "check.h"

void test_products();
void test_rows();
void test_attention();
void test_experts();
void test_sampler();
void test_history();

int main() {
  test_products();
  test_rows();
  test_attention();
  test_experts();
  test_sampler();
  test_history();
  printf("%ld failures\n", Test::failures());
  return Test::failures() ? 1 : 0;
}
