"""Makes src/lockstep/data/fashion-mnist-mini.npz from Fashion-MNIST: the first images of each class, in their order.

python tools/make_mini.py
"""

import numpy as np

from lockstep.data import load_dataset
from lockstep.data.fashion_mnist import MINI

NOTICE = """A sample of Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017): the first 200 training and the first 50 test
images of each of its ten classes, in their original order.

The MIT License (MIT)

Copyright (c) 2017 Zalando SE, https://tech.zalando.com

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def first_of_each_class(X: np.ndarray, y: np.ndarray, num_each: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `num_each` samples of each class, in their order."""
    chosen = np.sort(np.concatenate([np.flatnonzero(y == label)[:num_each] for label in range(10)]))
    return X[chosen][:, 0], y[chosen].astype(np.uint8)


def main() -> None:
    data = load_dataset("fashion-mnist")
    X_train, y_train = first_of_each_class(data.X_train, data.y_train, 200)
    X_test, y_test = first_of_each_class(data.X_test, data.y_test, 50)
    np.savez_compressed(MINI, X_train=X_train, y_train=y_train, X_test=X_test, y_test=y_test, license=np.array(NOTICE))
    print(f"{MINI.name}: {MINI.stat().st_size} bytes")


if __name__ == "__main__":
    main()
