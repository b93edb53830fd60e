"""A folder of images to try: some of scikit-learn's handwritten digits, one folder for each class.

python make_digit_images.py [digit_images] [1000]
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

root, digits = Path(sys.argv[1] if len(sys.argv) > 1 else "digit_images"), load_digits()
images = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
for row in range(images):
    path = root / f"digit-{digits.target[row]}" / f"{row:04}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(path)
print(f"Wrote {images:,} images of 8×8 to {root}.")
